"""Compiled programs are kept on disk, and nothing depends on it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from numpyro_jala import set_program_cache
from numpyro_jala.backend import cache

ROOT = Path(__file__).parents[2]
CHILD = """
import collections, json, warnings
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
from jax import random
from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means
warnings.simplefilter("ignore")
jala = JALAEM(normal_means, num_particles=16, num_islands=2)
jala.run(random.key(0), 5, SCHOOLS, progress_bar=False)
found = {name: events["/jax/compilation_cache/cache_" + name] for name in ("hits", "misses")}
print(json.dumps({**found, "result": [float(x) for x in jala.params.values()]}))
"""


def start(folder):
    """Start a process that fits a small model."""
    environment = {**os.environ, cache.VARIABLE: str(folder)}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    return subprocess.Popen(
        [sys.executable, "-c", CHILD], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    )


def end(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_what_two_processes_write_at_once_a_third_does_not_compile(tmp_path):
    first, second = map(end, [start(tmp_path), start(tmp_path)])
    third = end(start(tmp_path))
    assert first["misses"] > 0 and third["misses"] == 0
    assert third["hits"] == first["hits"] + first["misses"] > 100
    assert first["result"] == second["result"] == third["result"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to keep programs in, with no cache for all of JAX."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "programs"))
    yield tmp_path / "programs" / cache._machine()
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def compile_and_count():
    """Compile a program that this process has not compiled; return hits and misses."""
    events = []

    def listen(event, **_):
        events.append(event)

    jax.monitoring.register_event_listener(listen)
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(3.0))
    jax.monitoring.unregister_event_listener(listen)
    return tuple(
        sum(event.endswith(f"cache_{kind}") for event in events)
        for kind in ("hits", "misses")
    )


def files(place):
    return {path.name for path in place.iterdir()} if place.exists() else set()


def test_a_program_is_written_once_and_then_read(place):
    with cache.kept():
        assert compile_and_count()[1] > 0
        assert files(place)
    written = files(place)
    jax.clear_caches()
    with cache.kept():
        hits, misses = compile_and_count()
    assert hits > 0 and misses == 0 and files(place) == written


def test_only_what_is_compiled_within_is_kept(place):
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", -1.0)
    with pytest.raises(KeyboardInterrupt), cache.kept():
        assert Path(jax.config.jax_compilation_cache_dir) == place
        compile_and_count()
        raise KeyboardInterrupt
    assert jax.config.jax_compilation_cache_dir is None
    assert jax.config.jax_persistent_cache_min_compile_time_secs == -1.0
    written = files(place)
    jax.clear_caches()
    found = compile_and_count()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    assert found == (0, 0) and files(place) == written


@pytest.mark.parametrize("word", ["0", "off", "OFF", ""])
def test_it_can_be_switched_off(place, monkeypatch, word):
    monkeypatch.setenv(cache.VARIABLE, word)
    with cache.kept():
        assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv(cache.VARIABLE, "elsewhere")
    set_program_cache(None)
    assert cache.folder() is None
    set_program_cache(place)
    assert cache.folder() == place


def test_a_cache_for_all_of_jax_is_left_alone(place, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    with cache.kept():
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert not place.exists()


def read_only(place, monkeypatch):
    place.parent.mkdir(parents=True)
    if os.geteuid() == 0:  # whom no permission stops
        place.write_text("a file where the folder should be")
    else:
        place.parent.chmod(0o500)


def full(place, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", no_space)


def nearly_full(place, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=1_000)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)


@pytest.mark.parametrize("trouble", [read_only, full, nearly_full])
def test_a_disk_that_cannot_be_written_is_done_without(place, monkeypatch, trouble):
    trouble(place, monkeypatch)
    with cache.kept():
        assert jax.config.jax_compilation_cache_dir is None
        assert compile_and_count() == (0, 0)


def test_a_disk_that_fails_meanwhile_is_done_without(place):
    with cache.kept():
        shutil.rmtree(place)
        place.write_text("a file where the folder was")
        compile_and_count()  # warnings are errors here


def test_what_was_written_by_half_is_compiled(place):
    with cache.kept():
        compile_and_count()
    for path in place.iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    jax.clear_caches()
    with cache.kept():
        found = jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(3.0))
    assert abs(found - (jnp.sin(1.0) + 2 * jnp.sin(2.0))) < 1e-6


def test_the_oldest_programs_make_room(place, monkeypatch):
    place.mkdir(parents=True)
    for age in range(10):
        path = place / str(age)
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(cache, "_MOST_BYTES", 1_000)
    cache._make_room.__wrapped__(place)
    assert len(files(place)) == 10
    monkeypatch.setattr(cache, "_MOST_BYTES", 900)
    cache._make_room.__wrapped__(place)
    assert files(place) == {"0", "1", "2", "3"}


def test_the_folder_is_the_users_own(monkeypatch):
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.folder() == Path("/somewhere/numpyro_jala")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.folder() == Path("/home/someone/.cache/numpyro_jala")


def test_no_user_has_no_folder(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.Path, "home", nobody)
    assert cache.folder() is None
