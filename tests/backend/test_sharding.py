"""Islands on many devices: the same numbers, and no particle leaves its device."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import Mesh

from numpyro_jala import JALAEM
from numpyro_jala.backend import blocks, sharding
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import estimation, programs
from numpyro_jala.inference.draws import define_draws
from numpyro_jala.inference.snapshots import take
from tests.tools import SCHOOLS, normal_means
from tests.worker import HANGS, OPTIONS

# Ten steps are enough to see whether the numbers are the same.
pytestmark = pytest.mark.filterwarnings("ignore:The parameters have not converged")

#: A number of particles in a block that is no other length.
MANY = 37
SIZES = {"num_particles": 4 * 2 * MANY, "num_islands": 4}
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    r"|collective-broadcast)(?:-start)?\("
)


def mesh_of(num_devices):
    return Mesh(np.array(jax.devices()[:num_devices]).reshape(2, -1), ("a", "b"))


def moved(compiled):
    """Return the shapes of all arrays that go from device to device."""
    text = compiled.as_text()
    shapes = [shape for found in COLLECTIVE.findall(text) for shape in _shapes(found)]
    assert shapes
    return shapes


def _shapes(text):
    for dims in re.findall(r"\w+\[([\d,]*)\]", text):
        yield tuple(int(n) for n in dims.split(",") if n)


@pytest.fixture(scope="module", autouse=True)
def in_blocks():
    """Evaluate each island in two blocks, as if there were many data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "num_particles", lambda *_: MANY)
        yield


#: Sums in another order may turn a test at its very edge, of which several components
#: make many. With these keys they turn none.
KEYS = {"joint": random.key(2), "auto": random.key(6)}


@pytest.fixture(scope="module", params=KEYS)
def spread(request):
    """A fit whose four islands lie on four devices."""
    jala = JALAEM(normal_means, **SIZES, mesh=mesh_of(4), components=request.param)
    jala.run(KEYS[request.param], 10, SCHOOLS, progress_bar=False)
    return jala


@pytest.fixture(scope="module")
def alone(spread):
    """The same on one device, not run yet."""
    return JALAEM(normal_means, **SIZES, components=spread._components)


def test_many_devices_give_the_numbers_of_one(spread, alone):
    alone.run(KEYS[alone._components], 10, SCHOOLS, progress_bar=False)
    assert len(spread.last_state.cloud.position.sharding.device_set) == 4
    for name, ours in spread.get_samples().items():
        np.testing.assert_allclose(ours, alone.get_samples()[name], rtol=1e-3, atol=1e-3)
    assert spread.log_evidence == pytest.approx(alone.log_evidence, abs=1e-4)
    assert spread.standard_errors()["tau"] == pytest.approx(
        alone.standard_errors()["tau"], rel=1e-3
    )


def test_no_particle_leaves_its_device(spread):
    run, state = spread._run, spread.last_state
    stage, count, wait = (np.asarray(n) for n in (EM_STEP, 5, 0))
    goal = state.target.params
    run_steps = programs.run_steps.lower(
        run.fixed, run.placed, state, stage, count, goal, wait
    )
    clouds = [take(state.cloud, run.fixed.layout.partition)] * 2
    key, fitted = state.rng_key, estimation.fit_loo(run.fixed, clouds)
    lowered = [run_steps, estimation.fit_loo.lower(run.fixed, clouds)]
    if run.fixed.layout.partition.is_joint:
        drawn = run.fixed, key, run.placed, goal, clouds, *fitted
        lowered.append(estimation.bridge_to.lower(*drawn))
    else:
        draws = define_draws(run.fixed, key, 4 * MANY // 2, *fitted, goal)
        given = run.fixed, run.placed, goal, draws
        lowered.append(estimation.sample.lower(*given, clouds))
        lowered.append(estimation.score.lower(*given))
    for each in lowered:
        assert not any(n % MANY == 0 for shape in moved(each.compile()) for n in shape)


def test_particles_that_left_would_be_seen(spread):
    with sharding.over(spread.mesh):
        gather = jax.jit(sharding.share).lower(spread.last_state.cloud.position)
    assert any(2 * MANY in shape for shape in moved(gather.compile()))


def test_a_checkpoint_goes_on_with_another_number_of_devices(spread, alone, tmp_path):
    path, options = tmp_path / "fit.npz", {"progress_bar": False, "checkpoint_every": 5}
    key = KEYS[alone._components]
    for jala, num_steps in ((alone, 5), (spread, 10)):
        jala.run(key, num_steps, SCHOOLS, checkpoint=path, **options)
    alone.run(key, 10, SCHOOLS, progress_bar=False)
    assert spread.get_extra_fields()["log_evidence"].size == 10
    assert spread.log_evidence == pytest.approx(alone.log_evidence, abs=1e-4)


@pytest.mark.parametrize("traced", [True, False])
def test_the_pure_interface_spreads_as_well(spread, traced):
    if traced:  # where the values of the data are not known the latents are one component
        state = jax.jit(spread.init)(random.key(0), SCHOOLS)
        new, info = jax.jit(spread.update)(state, SCHOOLS)
    else:
        state = spread.init(random.key(0), SCHOOLS)
        new, info = spread.update(state, SCHOOLS)
    assert len(new.cloud.position.sharding.device_set) == 4
    assert info.ess.sharding.is_fully_replicated and bool(jnp.isfinite(info.ess).all())


def test_a_mesh_that_cannot_share_the_islands_is_refused():
    with pytest.raises(ValueError, match="num_islands=6 cannot be shared by the 4"):
        JALAEM(normal_means, num_particles=48, num_islands=6, mesh=mesh_of(4))
    with pytest.raises(TypeError, match="mesh=4 is not a jax.sharding.Mesh"):
        JALAEM(normal_means, mesh=4)


def free_port():
    with socket.socket() as open_socket:
        open_socket.bind(("localhost", 0))
        return open_socket.getsockname()[1]


def test_two_processes_fit_together_and_survive_a_death(tmp_path):
    """Both find the numbers of one; when one dies the run ends, and can go on alone."""
    path, port = tmp_path / "fit.npz", str(free_port())
    root = str(Path(__file__).parents[2])
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "PYTHONPATH": root, "XLA_FLAGS": flags}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.worker", str(rank), port, str(path)],
            cwd=root,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    try:
        said = [worker.communicate(timeout=HANGS + 100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    found = [re.search(r"FOUND (\S+) (\S+) (\S+)", out) for out, _ in said]
    assert all(found), said
    assert found[0].groups() == found[1].groups()
    assert workers[0].returncode != 0 and "another task died" in said[0][1]

    alone = JALAEM(normal_means, **OPTIONS)
    alone.run(random.key(0), 10, SCHOOLS, progress_bar=False)
    log_evidence = float(found[0].group(2))
    # Sums in another order lead, after some steps, to other choices of particles.
    assert abs(log_evidence - alone.log_evidence) < 4 * alone.log_evidence_se
    alone.run(
        random.key(0), 20, SCHOOLS, progress_bar=False, checkpoint=path, checkpoint_every=5
    )
    assert alone.get_extra_fields()["log_evidence"].size == 20
