"""Models with independent groups, data drawn from them, and their exact log-likelihoods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpy.typing import NDArray
from numpyro.distributions import constraints
from quadrature import float64
from scipy import special, stats

Array = NDArray[Any]
Params = dict[str, Array]
#: Of latents and data: those of groups ``chosen``, at the nodes ``z`` (num_nodes, dim).
GroupDensity = Callable[[Array, Array], Array]  # -> (num_chosen, num_nodes)
#: Entries of an array that are held in memory at a time.
MOST_ENTRIES = 3_000_000


class Data(NamedTuple):
    """Rows in groups, one line for each group, with NaN where a group has fewer."""

    x: Array  # (num_groups, per_group)
    y: Array  # (num_groups, per_group)


class Study(NamedTuple):
    """A model of groups, how to draw data, and the log-likelihood by quadrature.

    ``exact`` takes data in float64, params and the width between nodes, of which a closed
    form has no need.
    """

    model: Callable[..., None]
    truth: dict[str, Any]
    shape: tuple[int, int]  # groups, rows in each
    draw: Callable[[np.random.Generator, Params, Array], Array]
    exact: Callable[[Data, Params, float], float]
    width: float = 0.1


# -- quadrature ------------------------------------------------------------------------


def lattice(dim: int, width: float) -> tuple[Array, Array]:
    """Return nodes of the trapezoidal rule for a standard normal, and log-weights.

    It converges geometrically in the inverse of ``width``, as integrands are analytic.
    """
    half = np.arange(width / 2, 8, width)
    line = np.concatenate([-half[::-1], half])
    nodes = np.stack(np.meshgrid(*[line] * dim, indexing="ij"), -1).reshape(-1, dim)
    return nodes, stats.norm.logpdf(nodes).sum(1) + dim * np.log(width)


def integrate(
    density_fn: GroupDensity, shape: tuple[int, int], width: float, dim: int
) -> float:
    r"""Compute :math:`\sum_g \log \int N(z; 0, I) p_g(z) dz`."""
    nodes, log_weight = lattice(dim, width)
    num_groups, per_group = shape
    num_chunks = 1 + num_groups * per_group * len(nodes) // MOST_ENTRIES
    return sum(
        float(special.logsumexp(density_fn(chosen, nodes) + log_weight, axis=1).sum())
        for chosen in np.array_split(np.arange(num_groups), num_chunks)
    )


def one_effect(log_density_fn: Callable[[Array, Array, Params], Array]) -> Any:
    """Make the log-likelihood of a normal intercept for each group.

    ``log_density_fn`` takes observations, their linear predictor and the params.
    """

    def exact(data: Data, params: Params, width: float) -> float:
        beta = params.get("beta", np.zeros(2))
        offset = beta[0] + beta[1] * data.x

        def density(chosen: Array, z: Array) -> Array:
            predictor = offset[chosen, :, None] + params["sd"] * z[:, 0]
            return log_density_fn(data.y[chosen, :, None], predictor, params).sum(1)

        return integrate(density, data.y.shape, width, 1)

    return exact


def bernoulli(y: Array, predictor: Array, params: Params) -> Array:
    """Return the log-probabilities of zeros and ones."""
    return -np.log1p(np.exp(np.where(y > 0, -predictor, predictor)))


def ordinal(y: Array, predictor: Array, params: Params) -> Array:
    """Return the log-probabilities of ordered categories."""
    edges = np.concatenate([[-np.inf], params["cutpoints"], [np.inf]])
    category = y.astype(int)
    upper, lower = edges[category + 1], edges[category]
    return np.log(special.expit(upper - predictor) - special.expit(lower - predictor))


def poisson(y: Array, predictor: Array) -> Array:
    """Return the log-probabilities of counts."""
    return y * predictor - np.exp(predictor) - special.gammaln(y + 1)


def zero_inflated(y: Array, predictor: Array, params: Params) -> Array:
    """Return the log-probabilities of counts with more zeros."""
    gate = params["gate"]
    count = np.log1p(-gate) + poisson(y, predictor)
    return np.where(y > 0, count, np.logaddexp(np.log(gate), count))


def negative_binomial(y: Array, predictor: Array, params: Params) -> Array:
    """Return the log-probabilities of counts with more spread."""
    size = params["concentration"]
    return stats.nbinom.logpmf(y, size, size / (size + np.exp(predictor)))


def exact_slopes(data: Data, params: Params, width: float) -> float:
    """Integrate an intercept and a slope, correlated, out of each group."""
    root = np.array([[1.0, 0.0], [params["rho"], np.sqrt(1 - params["rho"] ** 2)]])
    root = params["sd"][:, None] * root

    def density(chosen: Array, z: Array) -> Array:
        effect = params["beta"] + z @ root.T
        predictor = effect[:, 0] + effect[:, 1] * data.x[chosen, :, None]
        return bernoulli(data.y[chosen, :, None], predictor, params).sum(1)

    return integrate(density, data.y.shape, width, 2)


def exact_nested(data: Data, params: Params, width: float) -> float:
    """Integrate effects of observation, pair and place, the inner ones first.

    A line of ``data`` is a place; its rows are pairs, and the last may be alone.
    """
    nodes, log_weight = lattice(1, width)
    row, pair, place = params["sds"][:, None] * nodes[:, 0]
    effect = place[:, None, None] + pair[:, None] + row  # (place, pair, row)
    factor, weight = np.exp(effect), np.exp(log_weight)

    def log_row(x: float, y: float) -> Array:
        offset = params["beta"][0] + params["beta"][1] * x
        log_count = y * effect - np.exp(offset) * factor
        with np.errstate(divide="ignore"):  # far out there is nothing
            log_integral = np.log(np.exp(log_count) @ weight)
        return log_integral + y * offset - special.gammaln(y + 1)

    total = 0.0
    for x, y in zip(data.x, data.y, strict=True):
        rows = [log_row(*each) for each in zip(x, y, strict=True) if np.isfinite(each[1])]
        log_place = log_weight
        for first in range(0, len(rows), 2):
            log_pair = sum(rows[first : first + 2]) + log_weight
            log_place = log_place + special.logsumexp(log_pair, axis=-1)
        total += float(special.logsumexp(log_place))
    return total


def exact_gamma(data: Data, params: Params, width: float) -> float:
    """Integrate a Gamma rate out of each group, in closed form."""
    shape, rate = params["shape"], params["rate"]
    total, num = data.y.sum(1), data.y.shape[1]
    log_integral = special.gammaln(shape + total) - (shape + total) * np.log(rate + num)
    log_prior = shape * np.log(rate) - special.gammaln(shape)
    return float(np.sum(log_prior + log_integral) - special.gammaln(data.y + 1).sum())


TRIALS = 5


def exact_beta(data: Data, params: Params, width: float) -> float:
    """Integrate a Beta probability out of each group, in closed form."""
    a, b = params["a"], params["b"]
    ones, trials = data.y.sum(1), TRIALS * data.y.shape[1]
    log_integral = special.betaln(a + ones, b + trials - ones) - special.betaln(a, b)
    # of one over the binomial coefficient
    log_ways = np.log(TRIALS + 1) + special.betaln(data.y + 1, TRIALS - data.y + 1)
    return float(log_integral.sum() - log_ways.sum())


# -- models ----------------------------------------------------------------------------


def positive(name: str, value: Any = 1.0) -> Any:
    """Declare a param above zero."""
    return numpyro.param(name, value, constraint=constraints.positive)


def intercepts(group: Array, num_groups: int) -> Any:
    """Draw a normal effect for each group, and give each row its group's."""
    sd = positive("sd")
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    return u[group]


def predictor(group: Array, x: Array, num_groups: int) -> Any:
    """Return an intercept, a slope and a normal effect of the group."""
    beta = numpyro.param("beta", jnp.zeros(2))
    return beta[0] + beta[1] * x + intercepts(group, num_groups)


def binary_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe zeros and ones."""
    numpyro.sample("y", dist.Bernoulli(logits=predictor(group, x, num_groups)), obs=y)


def slopes_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe zeros and ones, with an intercept and a slope for each group."""
    beta = numpyro.param("beta", jnp.zeros(2))
    sd = positive("sd", jnp.ones(2))
    rho = numpyro.param("rho", 0.0, constraint=constraints.interval(-1.0, 1.0))
    root = jnp.array([[1.0, 0.0], [rho, jnp.sqrt(1 - rho**2)]])
    with numpyro.plate("groups", num_groups):
        effect = dist.MultivariateNormal(beta, scale_tril=sd[:, None] * root)
        u = numpyro.sample("u", effect)
    logits = u[group, 0] + u[group, 1] * x
    numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def ordinal_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe ordered categories."""
    start = jnp.array([-1.0, 0.0, 1.0])
    cuts = numpyro.param("cutpoints", start, constraint=constraints.ordered_vector)
    effect = intercepts(group, num_groups)
    numpyro.sample("y", dist.OrderedLogistic(effect, cuts), obs=y.astype(int))


def zero_inflated_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe counts with more zeros."""
    gate = numpyro.param("gate", 0.5, constraint=constraints.unit_interval)
    rate = jnp.exp(predictor(group, x, num_groups))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, rate), obs=y)


def negative_binomial_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe counts with more spread."""
    mean = jnp.exp(predictor(group, x, num_groups))
    numpyro.sample("y", dist.NegativeBinomial2(mean, positive("concentration")), obs=y)


def nested_model(levels: Array, x: Array, y: Array, sizes: tuple[int, ...]) -> None:
    """Observe counts, with effects of the row, of its pair and of its place."""
    beta = numpyro.param("beta", jnp.zeros(2))
    sds = positive("sds", jnp.full(3, 0.5))
    total = beta[0] + beta[1] * x
    for i, name in enumerate(("row", "pair", "place")):
        effect = numpyro.sample(name, dist.Normal(0.0, sds[i]).expand([sizes[i]]))
        total += effect[levels[i]]
    numpyro.sample("y", dist.Poisson(jnp.exp(total)), obs=y)


def gamma_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe counts with a Gamma rate for each group."""
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Gamma(positive("shape"), positive("rate")))
    numpyro.sample("y", dist.Poisson(u[group]), obs=y)


def beta_model(group: Array, x: Array, y: Array, num_groups: int) -> None:
    """Observe shares of trials with a Beta probability for each group."""
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Beta(positive("a"), positive("b")))
    numpyro.sample("y", dist.Binomial(TRIALS, probs=u[group]), obs=y)


# -- data ------------------------------------------------------------------------------


def draw_effects(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw the linear predictor with one effect for each group."""
    beta = params.get("beta", np.zeros(2))
    u = params["sd"] * rng.normal(size=len(x))
    return beta[0] + beta[1] * x + u[:, None]


def draw_binary(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw zeros and ones."""
    return rng.random(x.shape) < special.expit(draw_effects(rng, params, x))


def draw_slopes(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw zeros and ones with two effects for each group."""
    root = np.array([[1.0, 0.0], [params["rho"], np.sqrt(1 - params["rho"] ** 2)]])
    u = params["beta"] + params["sd"] * (rng.normal(size=(len(x), 2)) @ root.T)
    return rng.random(x.shape) < special.expit(u[:, :1] + u[:, 1:] * x)


def draw_ordinal(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw ordered categories."""
    level = draw_effects(rng, params, x) + rng.logistic(size=x.shape)
    return np.searchsorted(params["cutpoints"], level)


def draw_zero_inflated(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw counts with more zeros."""
    count = rng.poisson(np.exp(draw_effects(rng, params, x)))
    return np.where(rng.random(x.shape) < params["gate"], 0, count)


def draw_negative_binomial(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw counts with more spread."""
    size = params["concentration"]
    return rng.poisson(
        np.exp(draw_effects(rng, params, x)) * rng.gamma(size, 1 / size, x.shape)
    )


def draw_nested(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw counts; the first third of the places has a row less."""
    num_places, most = x.shape
    row = rng.normal(size=x.shape)
    pair = np.repeat(rng.normal(size=(num_places, most // 2 + 1)), 2, axis=1)[:, :most]
    effects = np.stack([row, pair, np.repeat(rng.normal(size=(num_places, 1)), most, 1)])
    total = params["beta"][0] + params["beta"][1] * x
    total = total + np.tensordot(params["sds"], effects, 1)
    y = rng.poisson(np.exp(total)).astype(float)
    y[: num_places // 3, -1] = np.nan
    return y


def draw_gamma(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw counts of a Gamma rate."""
    rate = rng.gamma(params["shape"], 1 / params["rate"], (len(x), 1))
    return rng.poisson(np.broadcast_to(rate, x.shape))


def draw_beta(rng: np.random.Generator, params: Params, x: Array) -> Array:
    """Draw numbers of successes of a Beta probability."""
    probability = rng.beta(params["a"], params["b"], (len(x), 1))
    return rng.binomial(TRIALS, np.broadcast_to(probability, x.shape))


def draw(study: Study, seed: int) -> Data:
    """Draw a data set, rounded to what the model sees."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=study.shape).astype(np.float32)
    truth = {name: np.asarray(value, float) for name, value in study.truth.items()}
    return Data(*float64(x, study.draw(rng, truth, x.astype(float)).astype(np.float32)))


def arrange(study: Study, data: Data) -> tuple[Any, ...]:
    """Return the arguments of the model, rows in an order that is not that of groups."""
    group, column = np.nonzero(np.isfinite(data.y))
    order = np.random.default_rng(1).permutation(group.size)
    group, column = group[order], column[order]
    columns = (array[group, column].astype(np.float32) for array in data)
    if study.model is not nested_model:
        return group.astype(np.int32), *columns, len(data.y)
    pair = np.unique(group * data.y.shape[1] + column // 2, return_inverse=True)[1]
    levels = np.stack([np.arange(group.size), pair, group]).astype(np.int32)
    return levels, *columns, tuple(int(each.max()) + 1 for each in levels)


# -- studies ---------------------------------------------------------------------------


def binary(num_groups: int, sd: float) -> Study:
    """Make a study of zeros and ones, six for each group."""
    truth = {"beta": [-0.5, 0.8], "sd": sd}
    exact = one_effect(bernoulli)
    return Study(binary_model, truth, (num_groups, 6), draw_binary, exact, 0.15)


def slopes(num_groups: int, per_group: int) -> Study:
    """Make a study of zeros and ones with an intercept and a slope for each group."""
    truth = {"beta": [-0.5, 0.8], "sd": [1.5, 1.0], "rho": 0.4}
    shape = num_groups, per_group
    return Study(
        slopes_model,
        truth,
        shape,
        draw_slopes,
        exact_slopes,
        0.4 if per_group < 20 else 0.25,
    )


def counts(model: Any, draw_fn: Any, log_density_fn: Any, **truth: float) -> Study:
    """Make a study of counts, eight for each of 200 groups."""
    truth_of_all = {"beta": [0.7, 0.4], "sd": 0.8, **truth}
    return Study(model, truth_of_all, (200, 8), draw_fn, one_effect(log_density_fn), 0.1)


STUDIES = {
    "binary_sd4": binary(300, 4.0),
    "binary_100": binary(100, 2.0),
    "binary_1000": binary(1_000, 2.0),
    "binary_10000": binary(10_000, 2.0),
    "slopes": slopes(500, 10),
    "slopes_60": slopes(60, 34),
    "nested": Study(
        nested_model,
        {"beta": [1.0, 0.3], "sds": [0.4, 0.5, 0.6]},
        (60, 7),
        draw_nested,
        exact_nested,
        0.375,
    ),
    "ordinal": Study(
        ordinal_model,
        {"cutpoints": [-1.5, 0.0, 1.2], "sd": 1.5},
        (200, 8),
        draw_ordinal,
        one_effect(ordinal),
    ),
    "zero_inflated": counts(
        zero_inflated_model, draw_zero_inflated, zero_inflated, gate=0.3
    ),
    "negative_binomial": counts(
        negative_binomial_model,
        draw_negative_binomial,
        negative_binomial,
        concentration=2.0,
    ),
    "gamma_poisson": Study(
        gamma_model, {"shape": 1.2, "rate": 0.6}, (200, 4), draw_gamma, exact_gamma
    ),
    "beta_binomial": Study(
        beta_model, {"a": 0.8, "b": 2.0}, (200, 3), draw_beta, exact_beta
    ),
}
