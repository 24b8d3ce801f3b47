"""Programs are kept, but not those of every model there ever was."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

from numpyro_jala import JALAEM, compilation, fitter, reference


def means(y):
    """Means around `centre`, each seen once."""
    centre = numpyro.param("centre", 0.0)
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(centre, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def test_programs_are_kept_until_there_is_no_room_for_more(monkeypatch):
    monkeypatch.setattr(compilation, "_programs", [])
    monkeypatch.setattr(fitter, "_MOST_KEPT", 2)
    traced = []

    @compilation.compiled
    def double(problem, x):
        traced.append(problem)
        return 2 * x

    def look(jala, size):
        jala._inspect(random.key(0), (np.zeros(size),), {})
        double("one", jnp.ones(()))

    first, second = JALAEM(means), JALAEM(means)
    look(first, 2)
    look(second, 2)
    assert traced == ["one"]
    monkeypatch.setattr(compilation, "share_of_maps", lambda: 0.9)
    look(second, 2)  # known already
    assert traced == ["one"]
    look(second, 3)
    assert traced == ["one"] * 2
    look(second, 4)
    assert len(second._fixed) == 2 and len(first._fixed) == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not on Linux")
def test_forgotten_programs_give_their_memory_maps_back(monkeypatch):
    monkeypatch.setattr(compilation, "_programs", [])
    add = compilation.compiled(lambda problem, x: jnp.sin(x) + problem)
    before = compilation.share_of_maps()
    for problem in range(20):
        add(problem, jnp.ones(3))
    taken = compilation.share_of_maps()
    monkeypatch.setattr(compilation, "_ENOUGH", 0.0)
    compilation.make_room()
    assert 0 < before < taken
    assert compilation.share_of_maps() < (before + taken) / 2


def test_data_that_a_model_finds_around_it_may_change():
    around = {"y": np.array([0.3, -1.0], np.float32)}
    jala = JALAEM(lambda: means(around["y"]))

    def look():
        return jala._inspect(random.key(0), (), {})[0]

    first = look()
    assert look() is first
    around["y"] = around["y"] + 1
    second = look()
    assert second is not first and look() is second


def test_the_laplace_reference_is_compiled_once():
    y = np.array([0.3, -1.0, 2.0], np.float32)
    jala = JALAEM(means)
    fixed, arrays, _ = jala._inspect(random.key(0), (y,), {})
    at = reference.make("laplace", random.key(0), fixed.layout, jnp.zeros(1), arrays)
    size = reference._find_mode._cache_size()
    again = reference.make("laplace", random.key(0), fixed.layout, jnp.ones(1), arrays)
    assert reference._find_mode._cache_size() == size
    np.testing.assert_allclose(again.gaussian.mean - at.gaussian.mean, 0.5, rtol=1e-4)
