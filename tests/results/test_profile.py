"""The profile of one param of a model whose likelihood has a closed form."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm

from numpyro_jala import JALAEM, plots
from numpyro_jala.results.profile import Point, Scale, check_name, trace_profile

COUNTS = np.array([0, 1, 1, 2, 3, 3, 4, 5, 7, 9, 12, 24.0])  # skewed, of twelve groups


def model(counts):
    shape = numpyro.param("shape", 1.0, constraint=constraints.positive)
    pace = numpyro.param("pace", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", len(COUNTS)):
        rate = numpyro.sample("rate", dist.Gamma(shape, pace))
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)


def log_likelihood(shape, pace):
    terms = shape * np.log(pace) - gammaln(shape) + gammaln(shape + COUNTS)
    terms -= (shape + COUNTS) * np.log(pace + 1) + gammaln(COUNTS + 1)
    return float(np.sum(terms))


def profiled(shape):
    """Return the maximum over the pace, which has a closed form."""
    return log_likelihood(shape, shape / COUNTS.mean())


@pytest.fixture(scope="module")
def fitted():
    jala = JALAEM(model)
    jala.run(random.key(0), None, COUNTS, progress_bar=False)
    return jala


def test_the_interval_is_that_of_the_closed_form(fitted):
    with jax.enable_x64(True):
        top = minimize_scalar(lambda log: -profiled(np.exp(log)), (-1.0, 1.0)).x
        reach = norm.ppf(0.95) ** 2 / 2

        def beyond(log):
            return profiled(np.exp(top)) - profiled(np.exp(log)) - reach

        exact = [brentq(beyond, *ends) for ends in ((top - 4, top), (top, top + 4))]
        found = fitted.profile(random.key(1), "shape")
        expected = [profiled(value) for value in found.values["value"]]
    error = found.values["se"]
    assert np.all(np.abs(found.values["log_evidence"] - expected) < 4 * error + 1e-3)
    assert np.all(np.diff(found.values["zeta"]) > 0) and error.max() < 0.01
    # An error of the log-evidence moves an end by this, where the root is nearly a line.
    tolerance = 4 * 2**0.5 * error.max() / norm.ppf(0.95) * np.diff(exact)[0] / 3.3
    np.testing.assert_allclose(np.log([found.low, found.high]), exact, atol=tolerance)
    axes = plots.plot_profile(found)
    assert axes.get_xlabel() == "shape"
    assert [line.get_xdata()[0] for line in axes.lines[2:]] == [found.low, found.high]


def quadratic(below):
    """Return fits of a likelihood in the log of a param that falls on one side or on both."""

    def fit(value, params):
        log = np.log(value)
        drop = 0.5 * (log / 0.3) ** 2 * (below if log < 0 else 1.0)
        return Point(-5.0 - drop, 0.01, params)

    return fit


@pytest.mark.parametrize("prob", [0.5, 0.9, 0.99])
def test_a_gaussian_likelihood_gives_the_interval_of_wald(prob):
    scale = Scale(constraints.positive, 1.0, 0.3)
    found = trace_profile(quadratic(1.0), scale, "tau", Point(-5.0, 0.01, {}), prob)
    expected = 0.3 * norm.ppf(0.5 + prob / 2)
    assert np.log(found.high) == pytest.approx(expected, rel=1e-4)
    assert np.log(found.low) == pytest.approx(-expected, rel=1e-4)


def test_where_it_does_not_fall_the_interval_ends_at_the_edge():
    scale = Scale(constraints.positive, 1.0, np.nan)  # without a standard error
    found = trace_profile(quadratic(0.001), scale, "tau", Point(-5.0, 0.01, {}), 0.9)
    assert found.low == 0.0
    assert np.log(found.high) == pytest.approx(0.3 * norm.ppf(0.95), rel=1e-4)


def test_from_an_edge_the_other_end_is_found():
    """A likelihood in tau² that falls from zero on, where the estimate has ended."""

    def fit(value, params):
        return Point(-5.0 - value**2, 0.01, params)

    scale = Scale(constraints.positive, 1e-3, np.nan)
    found = trace_profile(fit, scale, "tau", Point(-5.0, 0.01, {}), 0.9)
    assert found.low == 0.0
    assert found.high == pytest.approx(norm.ppf(0.95) / 2**0.5, rel=0.02)
    assert len(found.values) < 30


def test_what_has_no_profile_is_refused_by_a_sentence(fitted):
    with pytest.raises(ValueError, match="no param 'scale'; there are pace, shape"):
        fitted.profile(random.key(0), "scale")
    with pytest.raises(ValueError, match=r"Param 'w' has shape \(3,\)"):
        check_name({"w": np.zeros(3)}, "w")
    with pytest.raises(ValueError, match=r"prob=1.5 is not between"):
        fitted.profile(random.key(0), "shape", prob=1.5)
