"""What the benchmarks compare with is right."""

import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from tests.tools import assert_mean

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    """Import a file of the benchmarks, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_importance_sampling_from_a_laplace_approximation_is_right(benchmark):
    problem = benchmark("problems").gaussian()
    run = benchmark("peers").laplace(problem, 2_000)
    found = [run(seed).log_evidence for seed in range(20)]
    assert_mean(found, problem.log_evidence, resolution=0.05)


def test_the_potential_by_hand_is_that_of_the_model(benchmark):
    fused, model = benchmark("fused"), benchmark("fits").logistic_model
    data = fused.logistic_data()
    trace = run_once(model, random.key(0), data, {})
    layout = lay_out(model, trace, data, {})
    joint = layout.joint([jnp.asarray(array) for array in data])
    w = random.normal(random.key(1), (5, 9))
    params = jnp.array([0.7])
    ours = jax.vmap(lambda x: joint(params, jnp.ones(()), x))(w)
    by_hand = jax.vmap(lambda x: fused.logistic_potential(params[0], x, *data))(w)
    np.testing.assert_allclose(ours - ours[0], by_hand - by_hand[0], rtol=1e-4, atol=1e-2)
