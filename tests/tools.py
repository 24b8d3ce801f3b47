"""Shared by the tests: a statistical assertion, and small models with exact answers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from scipy.stats import multivariate_normal, norm

FAILURE_RATE = 1e-4

SCHOOLS = np.array([2.1, -0.3, 1.9, 4.0, 0.2, 1.1], np.float32)


def assert_mean(draws, expected, resolution):
    """Assert that independent draws average to `expected`.

    The tolerance is the standard error times the normal quantile of `FAILURE_RATE`. It
    must be finer than `resolution`, the smallest bias the test is there to find.
    """
    draws = np.asarray(draws, np.float64)
    tolerance = norm.isf(FAILURE_RATE / 2) * draws.std(ddof=1) / np.sqrt(draws.size)
    assert tolerance < resolution, f"{tolerance=:.3g} is too coarse"
    assert abs(draws.mean() - expected) < tolerance, f"{draws.mean()=:.5g} {tolerance=:.2g}"


#: The tests' programs are mostly compiled in a hurry, which does not pay for long loops.
quickly = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})


def replicate(function, *args):
    """Map a function over the first axes of its arguments, a hundred at a time."""
    mapped = quickly(
        lambda *rows: jax.lax.map(lambda row: function(*row), rows, batch_size=100)
    )
    return mapped(*args)


def normal_means(y=None):
    """Six group means around `mu` with spread `tau`, each seen once with unit noise."""
    mu = numpyro.param("mu", 0.0)
    tau = numpyro.param("tau", 0.5, constraint=constraints.positive)
    with numpyro.plate("group", 6):
        x = numpyro.sample("x", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
    numpyro.deterministic("total", x.sum())


def normal_means_log_likelihood(params, y=SCHOOLS):
    sd = np.sqrt(1 + float(params["tau"]) ** 2)
    return norm(float(params["mu"]), sd).logpdf(np.asarray(y, float)).sum()


def regression(x, y=None):
    """A Bayesian regression without params, correlated and not centred."""
    w = numpyro.sample("w", dist.Normal(jnp.array([1.0, -1.0, 0.5]), 1.5).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)


def regression_data():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(20, 3)) + np.array([0.5, 0.0, -1.0])
    x[:, 1] += 0.8 * x[:, 0]
    y = x @ np.array([0.4, 0.9, -0.3]) + 0.7 * rng.normal(size=20)
    return x.astype(np.float32), y.astype(np.float32)


def regression_log_evidence(x, y):
    x, y = np.asarray(x, float), np.asarray(y, float)
    covariance = 0.49 * np.eye(len(y)) + 1.5**2 * x @ x.T
    return multivariate_normal(x @ [1.0, -1.0, 0.5], covariance).logpdf(y)
