"""Regressions, after NumPyro's examples and tutorials."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64, gaussian_log_density
from numpyro.distributions.transforms import OrderedTransform, SimplexToOrderedTransform
from scipy import special, stats

INTEGRATED = "importance sampling from draws of NUTS"
BRIDGED = "bridge from draws of NUTS"


def divorce_data() -> tuple[Array, ...]:
    """Draw three standardised columns of 50 states."""
    rng = np.random.default_rng(20)
    age = rng.normal(size=50)
    marriage = -0.7 * age + 0.7 * rng.normal(size=50)
    return float32(marriage, age, -0.6 * age + 0.8 * rng.normal(size=50))


def divorce(marriage: Array, age: Array, y: Array) -> None:
    """Regress linearly on two correlated predictors."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 0.2))
    of_marriage = numpyro.sample("of_marriage", dist.Normal(0.0, 0.5))
    of_age = numpyro.sample("of_age", dist.Normal(0.0, 0.5))
    noise = numpyro.sample("noise", dist.Exponential(1.0))
    mean = intercept + of_marriage * marriage + of_age * age
    numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def divorce_exact(_: dict[str, Any]) -> float:
    """Integrate the coefficients in closed form, the noise by quadrature."""
    marriage, age, y = float64(*divorce_data())
    x = np.stack([np.full(y.size, 0.2), 0.5 * marriage, 0.5 * age], -1)

    def log_density(log_noise: Array) -> Array:
        noise = np.exp(log_noise)
        given = [gaussian_log_density(y, x @ x.T + sd**2 * np.eye(y.size)) for sd in noise]
        return stats.expon.logpdf(noise) + log_noise + given

    return box(log_density, [(-2.0, 2.0)], num_nodes=120)


def cover_data() -> tuple[Array, Array]:
    """Draw two kinds of forest behind seven measurements."""
    rng = np.random.default_rng(21)
    x = rng.normal(size=(300, 7))
    x[:, 1] = 0.9 * x[:, 0] + 0.4 * x[:, 1]
    truth = np.array([1.0, -0.5, 0.8, 0.0, 0.3, -1.2, 0.0])
    return float32(x, rng.random(300) < special.expit(x @ truth - 0.5))


def cover_type(x: Array, y: Array) -> None:
    """Regress logistically."""
    coefficients = dist.Normal(jnp.zeros(x.shape[-1]), jnp.ones(x.shape[-1])).to_event(1)
    slopes = numpyro.sample("slopes", coefficients)
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
    numpyro.sample("y", dist.Bernoulli(logits=x @ slopes + intercept), obs=y)


def proportion_data() -> tuple[Array, Array, Array]:
    """Draw who makes an appointment, called by one or by the other way."""
    rng = np.random.default_rng(22)
    gender, called = rng.random(400) < 0.5, rng.random(400) < 0.5
    chance = special.expit(-2.0 + 0.4 * gender + 0.8 * called)
    return float32(gender, called, rng.random(400) < chance)


def proportion(gender: Array, called: Array, y: Array) -> None:
    """Compare two proportions, given another predictor."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 10.0))
    of_gender = numpyro.sample("of_gender", dist.Normal(0.0, 10.0))
    of_call = numpyro.sample("of_call", dist.Normal(0.0, 10.0))
    logits = intercept + of_gender * gender + of_call * called
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def proportion_exact(_: dict[str, Any]) -> float:
    """Integrate over three coefficients."""
    gender, called, y = float64(*proportion_data())
    rows, counts = np.unique(np.stack([gender, called, y], -1), axis=0, return_counts=True)

    def log_density(intercept: Array, of_gender: Array, of_call: Array) -> Array:
        eta = intercept[:, None] + np.stack([of_gender, of_call], -1) @ rows[:, :2].T
        given = -np.logaddexp(0.0, (1 - 2 * rows[:, 2]) * eta) @ counts
        return given + sum(
            stats.norm(0, 10).logpdf(b) for b in (intercept, of_gender, of_call)
        )

    return box(log_density, [(-5.0, 0.5), (-2.5, 3.0), (-2.0, 4.0)], num_nodes=60)


def horseshoe_data(num_predictors: int = 6) -> tuple[Array, Array]:
    """Draw a response with three predictors that matter."""
    rng = np.random.default_rng(23)
    x = rng.normal(size=(50, num_predictors))
    return float32(x, x[:, :3] @ [2.0, -1.0, 0.5] + 0.3 * rng.normal(size=50))


def horseshoe(x: Array, y: Array) -> None:
    """Regress with coefficients that are near zero or far from it."""
    local = numpyro.sample("local", dist.HalfCauchy(jnp.ones(x.shape[1])))
    whole = numpyro.sample("whole", dist.HalfCauchy(1.0))
    unscaled = numpyro.sample("unscaled", dist.Normal(0.0, jnp.ones(x.shape[1])))
    slopes = numpyro.deterministic("slopes", whole * local * unscaled)
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    numpyro.sample("y", dist.Normal(x @ slopes, 1 / jnp.sqrt(precision)), obs=y)


def horseshoe_collapsed(x: Array, y: Array) -> None:
    """Integrate the coefficients, given which scales they have."""
    local = numpyro.sample("local", dist.HalfCauchy(jnp.ones(x.shape[1])))
    whole = numpyro.sample("whole", dist.HalfCauchy(1.0))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    scaled = x * (whole * local)
    covariance = scaled @ scaled.T + jnp.eye(len(y)) / precision
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


def horseshoe_logistic_data() -> tuple[Array, Array]:
    """Draw a yes or no with three predictors that matter."""
    rng = np.random.default_rng(24)
    x = rng.normal(size=(60, 5))
    return float32(x, rng.random(60) < special.expit(x[:, :3] @ [2.0, -1.0, 0.5]))


def horseshoe_logistic(x: Array, y: Array) -> None:
    """The same for a yes or no."""
    local = numpyro.sample("local", dist.HalfCauchy(jnp.ones(x.shape[1])))
    whole = numpyro.sample("whole", dist.HalfCauchy(1.0))
    unscaled = numpyro.sample("unscaled", dist.Normal(0.0, jnp.ones(x.shape[1])))
    numpyro.sample("y", dist.Bernoulli(logits=x @ (whole * local * unscaled)), obs=y)


def sparse_interactions(x: Array, y: Array) -> None:
    """Regress on all pairs of predictors by a kernel, with sparse effects."""
    num, dim = x.shape
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    expected = sigma * (2.0 / jnp.sqrt(num)) / (dim - 2.0)
    first = numpyro.sample("first", dist.HalfCauchy(expected))
    slab = numpyro.sample("slab", dist.InverseGamma(3.0, 1.0))
    ratio = numpyro.sample("ratio", dist.InverseGamma(3.0, 1.0))
    second = first**2 * jnp.sqrt(ratio) / slab
    local = numpyro.sample("local", dist.HalfCauchy(jnp.ones(dim)))
    scaled = x * jnp.sqrt(slab) * local / jnp.sqrt(slab + (first * local) ** 2)
    inner, squares = scaled @ scaled.T, (scaled**2) @ (scaled**2).T
    kernel = 0.5 * second**2 * ((1 + inner) ** 2 - squares - 1)
    kernel = kernel + (first**2 - second**2) * inner + 1.0
    covariance = kernel + (sigma**2 + 1e-4) * jnp.eye(num)
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


def sparse_data() -> tuple[Array, Array]:
    """Draw a response to one predictor and one pair of them."""
    rng = np.random.default_rng(25)
    x = rng.normal(size=(40, 5))
    return float32(x, x[:, 0] + 0.8 * x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=40))


def ordinal_data() -> tuple[Array, Array]:
    """Draw three ordered answers that depend on a predictor."""
    rng = np.random.default_rng(26)
    x = rng.normal(size=60)
    level = 1.5 * x + rng.logistic(size=60)
    return float32(x)[0], np.digitize(level, [-1.0, 1.0]).astype(np.int32)


def ordinal(x: Array, y: Array) -> None:
    """Ordered answers, with ordered normal cut points."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    base = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, OrderedTransform()))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)


def ordinal_simplex(x: Array, y: Array) -> None:
    """Ordered answers, with cut points from shares of the answers."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    shares = dist.Dirichlet(jnp.ones(3))
    transform = SimplexToOrderedTransform(0.0)
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(shares, transform))
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)


def ordered_log_likelihood(slope: Array, low: Array, high: Array) -> Array:
    """Compute the log-likelihood for arrays of slopes and cut points."""
    (x,), y = float64(ordinal_data()[0]), ordinal_data()[1]
    eta = slope[:, None] * x
    below = special.expit(low[:, None] - eta)
    above = special.expit(high[:, None] - eta)
    return np.log(np.choose(y, [below, above - below, 1 - above])).sum(-1)


def ordinal_exact(_: dict[str, Any]) -> float:
    """Integrate over slope, lower cut, and the logarithm of the gap."""

    def log_density(slope: Array, low: Array, log_gap: Array) -> Array:
        given = ordered_log_likelihood(slope, low, low + np.exp(log_gap))
        prior = stats.norm.logpdf(low) + stats.norm.logpdf(log_gap)
        return given + prior + stats.norm(0, 5).logpdf(slope)

    return box(log_density, [(-1.0, 5.0), (-4.0, 2.0), (-3.0, 3.0)], num_nodes=50)


def ordinal_simplex_exact(_: dict[str, Any]) -> float:
    """Integrate over slope and shares; the cuts are their log odds."""

    def log_density(slope: Array, first: Array, part: Array) -> Array:
        second = first + (1 - first) * part
        given = ordered_log_likelihood(slope, special.logit(first), special.logit(second))
        prior = np.log(2.0) + np.log1p(-first)
        return given + prior + stats.norm(0, 5).logpdf(slope)

    return box(log_density, [(-1.0, 5.0), (0.0, 0.9), (0.0, 1.0)], num_nodes=60)


def fish_data() -> tuple[Array, Array]:
    """Draw catches of groups, some of whom did not fish."""
    rng = np.random.default_rng(27)
    x = np.stack([np.ones(150), rng.random(150) < 0.5, rng.normal(size=150)], -1)
    rate, none = np.exp(x @ [0.5, 0.6, 0.4]), special.expit(x @ [-0.5, -0.8, 0.3])
    return float32(x, rng.poisson(rate) * (rng.random(150) > none))


def zero_inflated(x: Array, y: Array) -> None:
    """Count with more zeros than Poisson's; both parts depend on predictors."""
    of_gate = numpyro.sample("of_gate", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    of_rate = numpyro.sample("of_rate", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    poisson = dist.Poisson(jnp.exp(x @ of_rate))
    counts = dist.ZeroInflatedDistribution(poisson, gate_logits=x @ of_gate)
    numpyro.sample("y", counts, obs=y)


def truncated_data() -> Array:
    """Draw from a normal distribution that is cut off above at 2.3."""
    draws = stats.truncnorm(-np.inf, (2.3 - 1.0) / 2.0, 1.0, 2.0)
    return float32(draws.rvs(80, random_state=28))[0]


def truncated(y: Array) -> None:
    """Observe a normal distribution below a known bound."""
    loc = numpyro.sample("loc", dist.Normal())
    scale = numpyro.sample("scale", dist.LogNormal())
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.TruncatedNormal(loc, scale, high=2.3), obs=y)


def truncated_exact(_: dict[str, Any]) -> float:
    """Integrate over both."""
    (y,) = float64(truncated_data())

    def log_density(loc: Array, log_scale: Array) -> Array:
        scale = np.exp(log_scale)
        given = stats.norm(loc, scale).logpdf(y[:, None]).sum(0)
        given -= y.size * stats.norm(loc, scale).logcdf(np.float64(np.float32(2.3)))
        return given + stats.norm.logpdf(loc) + stats.norm.logpdf(log_scale)

    return box(log_density, [(-4.0, 6.0), (-1.0, 3.0)], num_nodes=80)


def unknown_bound(y: Array) -> None:
    """Observe a normal distribution below a bound that is not known."""
    loc = numpyro.sample("loc", dist.Normal())
    scale = numpyro.sample("scale", dist.LogNormal())
    gap = numpyro.sample("gap", dist.HalfNormal())
    with numpyro.plate("row", len(y)):
        high = gap + jnp.max(y)
        numpyro.sample("y", dist.TruncatedNormal(loc, scale, high=high), obs=y)


def unknown_bound_exact(_: dict[str, Any]) -> float:
    """Integrate over three."""
    (y,) = float64(truncated_data())

    def log_density(loc: Array, log_scale: Array, gap: Array) -> Array:
        scale = np.exp(log_scale)
        given = -0.5 * (((y - loc[:, None]) / scale[:, None]) ** 2).sum(-1)
        given -= y.size * (log_scale + 0.5 * np.log(2 * np.pi))
        given -= y.size * special.log_ndtr((y.max() + gap - loc) / scale)
        prior = stats.norm.logpdf(loc) + stats.norm.logpdf(log_scale)
        return given + prior + stats.halfnorm.logpdf(gap)

    return box(log_density, [(-4.0, 6.0), (-1.0, 3.0), (0.0, 6.0)], num_nodes=60)


def censored_data() -> tuple[Array, Array]:
    """Draw times until something happens, some of which were not waited for."""
    rng = np.random.default_rng(29)
    time, end = rng.exponential(2.5, 60), rng.uniform(0.5, 5.0, 60)
    return float32(np.minimum(time, end), time > end)


def censored(time: Array, is_censored: Array) -> None:
    """Observe exponential times, or that they are longer than this."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 2.0))
    waiting = dist.Exponential(rate)
    with numpyro.plate("row", len(time)):
        seen = dist.RightCensoredDistribution(waiting, is_censored)
        numpyro.sample("time", seen, obs=time)


def censored_exact(_: dict[str, Any]) -> float:
    """Integrate the rate: Gamma again."""
    time, is_censored = float64(*censored_data())
    num, total = np.sum(1 - is_censored), time.sum()
    prior = 2 * np.log(2.0) - special.gammaln(2.0)
    return float(prior + special.gammaln(2 + num) - (2 + num) * np.log(2 + total))


ENTRIES = {
    "bayesian_regression": Entry(
        divorce,
        divorce_data(),
        PAGES + "tutorials/bayesian_regression.html",
        "linear regression",
        divorce_exact,
        "closed form and quadrature",
        shown="of_age",
    ),
    "covtype": Entry(
        cover_type,
        cover_data(),
        PAGES + "examples/covtype.html",
        "logistic regression, 300 rows",
        by=INTEGRATED,
        shown="intercept",
    ),
    "proportion_test": Entry(
        proportion,
        proportion_data(),
        PAGES + "examples/proportion_test.html",
        "two proportions",
        proportion_exact,
        "quadrature",
        shown="of_call",
    ),
    "horseshoe": Entry(
        horseshoe,
        horseshoe_data(),
        PAGES + "examples/horseshoe_regression.html",
        "horseshoe, normal",
        by="closed form and importance sampling",
        collapsed=(horseshoe_collapsed, horseshoe_data()),
        shown="whole",
    ),
    "horseshoe_logistic": Entry(
        horseshoe_logistic,
        horseshoe_logistic_data(),
        PAGES + "examples/horseshoe_regression.html",
        "horseshoe, logistic",
        by=INTEGRATED,
        shown="whole",
    ),
    "sparse_regression": Entry(
        sparse_interactions,
        sparse_data(),
        PAGES + "examples/sparse_regression.html",
        "sparse pairs by a kernel",
        by=INTEGRATED,
        shown="sigma",
    ),
    "ordinal": Entry(
        ordinal,
        ordinal_data(),
        PAGES + "tutorials/ordinal_regression.html",
        "ordered answers",
        ordinal_exact,
        "quadrature",
        shown="slope",
    ),
    "ordinal_simplex": Entry(
        ordinal_simplex,
        ordinal_data(),
        PAGES + "tutorials/ordinal_regression.html",
        "ordered answers, cuts from shares",
        ordinal_simplex_exact,
        "quadrature",
        shown="slope",
    ),
    "zero_inflated_poisson": Entry(
        zero_inflated,
        fish_data(),
        PAGES + "examples/zero_inflated_poisson.html",
        "counts with many zeros",
        by=INTEGRATED,
        shown="of_rate",
    ),
    "truncated": Entry(
        truncated,
        (truncated_data(),),
        PAGES + "tutorials/truncated_distributions.html",
        "normal below a known bound",
        truncated_exact,
        "quadrature",
        shown="loc",
    ),
    "truncated_unknown": Entry(
        unknown_bound,
        (truncated_data(),),
        PAGES + "tutorials/truncated_distributions.html",
        "normal below an unknown bound",
        unknown_bound_exact,
        "quadrature",
        shown="gap",
    ),
    "censored": Entry(
        censored,
        censored_data(),
        PAGES + "tutorials/censoring.html",
        "times that are cut off",
        censored_exact,
        "closed form",
        shown="rate",
    ),
}
