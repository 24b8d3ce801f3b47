"""What the benchmarks compare with is right."""

import json
import sys
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive, log_likelihood
from scipy.stats import poisson

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


GROUP_STUDIES = (
    "binary_100 slopes nested ordinal zero_inflated negative_binomial gamma_poisson "
    "beta_binomial"
).split()


@pytest.mark.parametrize("name", GROUP_STUDIES)
def test_quadrature_integrates_the_model_of_groups(benchmark, name):
    """The likelihood is the mean of the data's density over draws from the prior."""
    models = benchmark("group_models")
    is_nested = name == "nested"  # one place has a pair, the others another row
    study = models.STUDIES[name]
    few = {"beta": [-0.5, 0.3]} if "beta" in study.truth else {}  # small counts
    shape = (3, 3) if is_nested else (2, 2)
    study = study._replace(shape=shape, truth={**study.truth, **few})
    data = models.draw(study, 5)
    args = models.arrange(study, data)
    params = {key: np.asarray(value, float) for key, value in study.truth.items()}
    model = handlers.substitute(study.model, data=params)
    blind = handlers.uncondition(model)
    draws = Predictive(blind, num_samples=50_000)(random.key(0), *args)
    latents = {key: value for key, value in draws.items() if key not in ("y", *params)}
    found = log_likelihood(model, latents, *args)["y"].sum(-1)
    exact = study.exact(data, params, study.width)
    assert_mean(
        np.exp(np.asarray(found, float) - exact), 1.0, resolution=0.2 if is_nested else 0.05
    )
    assert abs(exact - study.exact(data, params, 0.7 * study.width)) < 1e-4


def test_the_maximum_of_a_million_is_that_of_the_groups(benchmark):
    million, groups = benchmark("million"), benchmark("groups")
    study = groups.STUDIES["binary_100"]
    data = groups.draw(study, 0)
    fn = groups.likelihood(study, data)
    best = groups.maximise(fn, np.array([-0.5, 0.8, 2.0]))
    start = best.params + 0.1 * best.standard_errors
    params, errors, value = million.maximise(data, start)
    np.testing.assert_allclose(value, fn(start), rtol=1e-10)
    np.testing.assert_allclose(params, best.params, atol=1e-4)
    np.testing.assert_allclose(errors, best.standard_errors, rtol=1e-4)


def test_the_maximum_by_differences_is_that_of_a_normal_sample(benchmark):
    y = np.random.default_rng(0).normal(3.0, 2.0, 50)

    def log_density(point):
        return -0.5 * np.sum(((y - point[0]) / point[1]) ** 2) - y.size * np.log(point[1])

    best = benchmark("groups").maximise(log_density, np.array([2.0, 1.0]))
    sd = y.std()
    np.testing.assert_allclose(best.params, [y.mean(), sd], rtol=1e-4)
    errors = [sd / np.sqrt(y.size), sd / np.sqrt(2 * y.size)]
    np.testing.assert_allclose(best.standard_errors, errors, rtol=1e-4)


def test_a_filter_on_a_grid_is_the_kalman_filter_of_a_walk_with_noise(benchmark):
    models = benchmark("chain_models")
    step, noise = 0.4, 0.7
    y = np.random.default_rng(0).normal(size=30).cumsum()
    grid = models.even_grid(4.5 * step * 30**0.5, step)

    def says(points):
        return -0.5 * ((y[:, None] - points) / noise) ** 2 - np.log(noise)

    found = models.filter_grid(step, 1.0, step, says, 30, grid)
    exact = models.kalman((y,), {"step": step, "noise": noise})
    np.testing.assert_allclose(found - 15 * np.log(2 * np.pi), exact, rtol=1e-8)


def test_counts_of_a_gaussian_process_are_integrated_by_importance(benchmark):
    models = benchmark("chain_models")
    x, y = np.array([0.0, 0.7]), np.array([4.0, 0.0])
    params = {"base": 0.3, "scale": 1.4, "reach": 0.8}
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    root = np.linalg.cholesky(models.process_kernel(x, 1.4, 0.8, np))
    first, second = np.meshgrid(nodes, nodes)
    rate = np.exp(0.3 + np.stack([first, second], -1) @ root.T)
    likelihood = poisson(rate).pmf(y).prod(-1)
    exact = np.log(weights @ likelihood @ weights / weights.sum() ** 2)
    found = models.process_counts_exact((x, y), params, 100_000)
    np.testing.assert_allclose(found, exact, atol=0.005)


@pytest.mark.slow
def test_a_benchmark_of_groups_prints_a_record_for_each_seed(benchmark, capsys):
    groups = benchmark("groups")
    small = groups.STUDIES["gamma_poisson"]._replace(shape=(25, 4))
    groups.STUDIES["small"] = small
    groups.measure("small", range(2), 10, with_maximum=True)
    first, second, summary = map(json.loads, capsys.readouterr().out.splitlines())
    for record in (first, second):
        assert record["num_components"] == 25 and record["quadrature_error"] == 0
        assert abs(record["z"]) < 4 and record["worst_shift"] < 0.2
    assert summary["num_seeds"] == 2 and summary["worst_shift"] < 0.2
