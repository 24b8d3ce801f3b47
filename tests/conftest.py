"""Settings that have to be made before JAX is imported, and a shared fit."""

import atexit
import os
import shutil
import tempfile
import threading
from importlib.metadata import version

# The tests run in parallel anyway, and spend their time compiling, not computing.
FLAGS = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
FLAGS += " --xla_force_host_platform_device_count=4"
if version("jaxlib").startswith("0.10."):  # later ones do not know them
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", FLAGS)

# One folder of compiled programs for all workers, and never the user's own: a temporary one,
# or where NUMPYRO_JALA_TEST_CACHE says, so that the next run finds them too.
if "PYTEST_XDIST_WORKER" not in os.environ:
    programs = os.environ.get("NUMPYRO_JALA_TEST_CACHE")
    if not programs:
        programs = tempfile.mkdtemp(prefix="numpyro_jala-programs-")
        atexit.register(shutil.rmtree, programs, ignore_errors=True)
    os.environ["NUMPYRO_JALA_CACHE"] = os.path.abspath(programs)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax import random  # noqa: E402

from numpyro_jala import JALAEM  # noqa: E402
from numpyro_jala.backend import compilation  # noqa: E402
from tests.tools import SCHOOLS, normal_means  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs():
    """Tests compile more than runs do, which make room by themselves."""
    compilation.make_room()


@pytest.fixture(scope="session")
def compiled_means():
    """One object for all files: JAX spends its time compiling."""
    return JALAEM(normal_means, num_particles=256)


@pytest.fixture
def means(compiled_means):
    """The six group means, fitted."""
    compiled_means.run(random.key(0), 60, SCHOOLS, progress_bar=False)
    return compiled_means


@pytest.fixture
def compilations():
    """The thread of each compilation while a test runs."""
    # A run makes room for programs by forgetting others: not while these are counted.
    if compilation.share_of_maps() > 0.2:
        jax.clear_caches()
    threads = []

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            threads.append(threading.get_ident())

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield threads
    jax.monitoring.unregister_event_duration_listener(listen)
