"""Models whose latents form large components: chains, crossings and fields.

Each has data drawn from it, and a log-likelihood from elsewhere where there is one: a
Kalman filter or a multivariate normal for Gaussian models, and a filter on a grid for
chains with one latent a step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.control_flow import scan
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.special import expit, gammaln, logsumexp

Array = np.ndarray
Params = dict[str, Array]
POSITIVE = dist.constraints.positive


class Case(NamedTuple):
    """A model, params to draw data from, the arguments, and the exact log-likelihood."""

    model: Callable[..., Any]
    truth: dict[str, Any]
    draw: Callable[[np.random.Generator], tuple[Any, ...]]
    exact: Callable[[tuple[Any, ...], Params], float] | None


def positive(name: str, value: float) -> Any:
    """Declare a positive param."""
    return numpyro.param(name, value, constraint=POSITIVE)


# -- what is exact -----------------------------------------------------------------------


def log_normal(y: Array, mean: Array, covariance: Array) -> float:
    """Return the log-density of a multivariate normal distribution, NaN if there is none."""
    try:
        factor = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:  # by rounding, of an autoregression that explodes
        return np.nan
    white = np.linalg.solve(factor, y - mean)
    log_det = np.log(np.diag(factor)).sum()
    return float(-0.5 * white @ white - log_det - 0.5 * y.size * np.log(2 * np.pi))


def filter_grid(
    step_sd: float,
    persistence: float,
    first_sd: float,
    log_likelihood: Callable[[Array], Array],
    num_steps: int,
    grid: Array,
) -> float:
    """Filter an autoregression of one latent by quadrature on an even grid.

    ``log_likelihood(grid)`` gives what each observation (row) says at each point.
    """
    width = grid[1] - grid[0]

    def normal(x: Array, sd: float) -> Array:
        return np.exp(-0.5 * (x / sd) ** 2) / (sd * np.sqrt(2 * np.pi)) * width

    kernel = normal(grid[:, None] - persistence * grid, step_sd)
    prior, total = normal(grid, first_sd), 0.0
    for row in log_likelihood(grid)[:num_steps]:
        level = row.max()
        weight = prior * np.exp(row - level)
        total += np.log(weight.sum()) + level
        prior = kernel @ (weight / weight.sum())
    return float(total)


def even_grid(reach: float, step_sd: float) -> Array:
    """Return a grid around zero, on which sums over steps of such size are exact."""
    return np.linspace(-reach, reach, 2 * int(np.ceil(4 * reach / step_sd)) + 1)


# -- a random walk plus noise -------------------------------------------------------------


def walk_scan(y: Any) -> None:
    """Write the walk as a loop."""
    step, noise = positive("step", 1.0), positive("noise", 2.0)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        x = numpyro.sample("x", dist.Normal(last, step))
        numpyro.sample("y", dist.Normal(x, noise), obs=row)
        return x, None

    scan(body, 0.0, y)


def walk_cumsum(y: Any) -> None:
    """Write the walk as a sum of its steps."""
    step, noise = positive("step", 1.0), positive("noise", 2.0)
    with numpyro.plate("times", len(y)):
        steps = numpyro.sample("steps", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(step * jnp.cumsum(steps), noise), obs=y)


def kalman(args: tuple[Any, ...], params: Params) -> float:
    """Filter a random walk plus noise."""
    step, noise = float(params["step"]) ** 2, float(params["noise"]) ** 2
    mean = spread = total = 0.0
    for row in args[0].tolist():
        spread += step
        forecast = spread + noise
        error, gain = row - mean, spread / forecast
        total -= 0.5 * (np.log(2 * np.pi * forecast) + error**2 / forecast)
        mean, spread = mean + gain * error, spread * (1 - gain)
    return total


def walk(model: Callable[..., Any], length: int) -> Case:
    """Return a random walk plus noise of some length."""
    truth = {"step": 0.5, "noise": 1.0}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        x = np.cumsum(truth["step"] * rng.normal(size=length))
        return ((x + truth["noise"] * rng.normal(size=length)).astype(np.float32),)

    return Case(model, truth, draw, kalman)


def panel_model(y: Any) -> None:
    """Several walks plus noise side by side: as many components."""
    step, noise = positive("step", 1.0), positive("noise", 2.0)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        with numpyro.plate("series", y.shape[1]):
            x = numpyro.sample("x", dist.Normal(last, step))
            numpyro.sample("y", dist.Normal(x, noise), obs=row)
        return x, None

    scan(body, jnp.zeros(y.shape[1]), y)


def panel_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter each walk."""
    return sum(kalman((series,), params) for series in args[0].T)


def panel(num_series: int, length: int) -> Case:
    """Return several random walks plus noise."""
    one = walk(walk_scan, length)

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        return (np.stack([one.draw(rng)[0] for _ in range(num_series)], 1),)

    return Case(panel_model, one.truth, draw, panel_exact)


# -- a local linear trend with a season ----------------------------------------------------

SEASON = 12


def trend_model(y: Any) -> None:
    """Level, slope and a season of twelve, as innovations of a state of thirteen."""
    sds = numpyro.param("sds", 0.3 * jnp.ones(4), constraint=POSITIVE)

    def body(state: Any, row: Any) -> tuple[Any, None]:
        level, slope, season = state
        new_level = numpyro.sample("level", dist.Normal(level + slope, sds[0]))
        new_slope = numpyro.sample("slope", dist.Normal(slope, sds[1]))
        newest = numpyro.sample("season", dist.Normal(-season.sum(-1), sds[2]))
        numpyro.sample("y", dist.Normal(new_level + newest, sds[3]), obs=row)
        return (new_level, new_slope, jnp.append(newest, season[:-1])), None

    scan(body, (0.0, 0.0, jnp.zeros(SEASON - 1)), y)


def trend_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter level, slope and season with matrices."""
    sds, size = params["sds"], 1 + SEASON
    move = np.zeros((size, size))
    move[0, :2] = move[1, 1] = 1.0
    move[2, 2:] = -1.0
    move[np.arange(3, size), np.arange(2, size - 1)] = 1.0
    noise = np.zeros((size, size))
    noise[[0, 1, 2], [0, 1, 2]] = sds[:3] ** 2
    seen = np.zeros(size)
    seen[[0, 2]] = 1.0
    mean, spread, total = np.zeros(size), np.zeros((size, size)), 0.0
    for row in args[0].astype(float):
        mean, spread = move @ mean, move @ spread @ move.T + noise
        forecast = seen @ spread @ seen + sds[3] ** 2
        error, gain = row - seen @ mean, spread @ seen / forecast
        total -= 0.5 * (np.log(2 * np.pi * forecast) + error**2 / forecast)
        mean, spread = mean + gain * error, spread - np.outer(gain, seen @ spread)
    return float(total)


def trend(length: int) -> Case:
    """Return a local linear trend with a season."""
    truth = {"sds": [0.3, 0.05, 0.2, 0.5]}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        level, slope, season, rows = 0.0, 0.0, np.zeros(SEASON - 1), []
        for _ in range(length):
            steps = np.array(truth["sds"]) * rng.normal(size=4)
            level, slope = level + slope + steps[0], slope + steps[1]
            newest = -season.sum() + steps[2]
            season = np.append(newest, season[:-1])
            rows.append(level + newest + steps[3])
        return (np.array(rows, np.float32),)

    return Case(trend_model, truth, draw, trend_exact)


# -- chains that are not Gaussian -----------------------------------------------------------


def volatility_model(y: Any) -> None:
    """Stochastic volatility."""
    centre = numpyro.param("centre", 0.0)
    step = positive("step", 0.3)
    persistence = numpyro.param(
        "persistence", 0.9, constraint=dist.constraints.unit_interval
    )
    first = numpyro.sample("first", dist.Normal(0.0, step / jnp.sqrt(1 - persistence**2)))
    numpyro.sample("y0", dist.Normal(0.0, jnp.exp((centre + first) / 2)), obs=y[0])

    def body(last: Any, row: Any) -> tuple[Any, None]:
        h = numpyro.sample("h", dist.Normal(persistence * last, step))
        numpyro.sample("y", dist.Normal(0.0, jnp.exp((centre + h) / 2)), obs=row)
        return h, None

    scan(body, first, y[1:])


def volatility_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter the logarithm of the variance on a grid."""
    step, persistence = float(params["step"]), float(params["persistence"])
    first_sd = step / np.sqrt(1 - persistence**2)
    grid = even_grid(7 * first_sd, step)
    squares = args[0].astype(float)[:, None] ** 2

    def says(points: Array) -> Array:
        h = float(params["centre"]) + points
        return -0.5 * (np.log(2 * np.pi) + h + squares * np.exp(-h))

    return filter_grid(step, persistence, first_sd, says, len(squares), grid)


def volatility(length: int) -> Case:
    """Return a series with stochastic volatility."""
    truth = {"centre": -1.0, "persistence": 0.97, "step": 0.2}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        h, rows = truth["step"] / np.sqrt(1 - truth["persistence"] ** 2) * rng.normal(), []
        for _ in range(length):
            rows.append(np.exp((truth["centre"] + h) / 2) * rng.normal())
            h = truth["persistence"] * h + truth["step"] * rng.normal()
        return (np.array(rows, np.float32),)

    return Case(volatility_model, truth, draw, volatility_exact)


def counts_model(y: Any) -> None:
    """Counts around a random walk."""
    step = positive("step", 0.5)
    base = numpyro.param("base", 0.0)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        x = numpyro.sample("x", dist.Normal(last, step))
        numpyro.sample("y", dist.Poisson(jnp.exp(base + x)), obs=row)
        return x, None

    scan(body, 0.0, y)


def logistic_model(x: Any, y: Any) -> None:
    """Logistic regression whose intercept walks."""
    step = positive("step", 0.5)
    slope = numpyro.param("slope", 0.0)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        a = numpyro.sample("a", dist.Normal(last, step))
        numpyro.sample("y", dist.Bernoulli(logits=a + slope * row[0]), obs=row[1])
        return a, None

    scan(body, 0.0, (x, y))


def walk_grid(length: int, step: float) -> Array:
    """Return a grid that a walk of the data's size does not leave."""
    return even_grid(4.5 * step * np.sqrt(length), step)


def counts_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter the logarithm of the rate on a grid."""
    y, step = args[0].astype(float)[:, None], float(params["step"])

    def says(points: Array) -> Array:
        rate = float(params["base"]) + points
        return y * rate - np.exp(rate) - gammaln(y + 1)

    return filter_grid(step, 1.0, step, says, len(y), walk_grid(len(y), step))


def logistic_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter the intercept on a grid."""
    x, y = (each.astype(float)[:, None] for each in args)
    step, slope = float(params["step"]), float(params["slope"])

    def says(points: Array) -> Array:
        return -np.logaddexp(0.0, (1 - 2 * y) * (points + slope * x))

    return filter_grid(step, 1.0, step, says, len(y), walk_grid(len(y), step))


def counts(length: int) -> Case:
    """Return counts around a random walk."""
    truth = {"base": 1.0, "step": 0.15}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        x = np.cumsum(truth["step"] * rng.normal(size=length))
        return (rng.poisson(np.exp(truth["base"] + x)).astype(np.int32),)

    return Case(counts_model, truth, draw, counts_exact)


def panel_counts_model(y: Any) -> None:
    """Counts around several random walks."""
    step = positive("step", 0.5)
    base = numpyro.param("base", 0.0)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        with numpyro.plate("series", y.shape[1]):
            x = numpyro.sample("x", dist.Normal(last, step))
            numpyro.sample("y", dist.Poisson(jnp.exp(base + x)), obs=row)
        return x, None

    scan(body, jnp.zeros(y.shape[1]), y)


def panel_counts_exact(args: tuple[Any, ...], params: Params) -> float:
    """Filter each series on a grid."""
    return sum(counts_exact((series,), params) for series in args[0].T)


def panel_counts(num_series: int, length: int) -> Case:
    """Return counts around several random walks."""
    one = counts(length)

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        return (np.stack([one.draw(rng)[0] for _ in range(num_series)], 1),)

    return Case(panel_counts_model, one.truth, draw, panel_counts_exact)


def logistic(length: int) -> Case:
    """Return a logistic regression whose intercept walks."""
    truth = {"slope": 1.0, "step": 0.3}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        a, x = np.cumsum(truth["step"] * rng.normal(size=length)), rng.normal(size=length)
        y = rng.random(length) < expit(a + truth["slope"] * x)
        return x.astype(np.float32), y.astype(np.int32)

    return Case(logistic_model, truth, draw, logistic_exact)


def autoregression_model(y: Any, seen: Any) -> None:
    """Two lags, seen with noise where it is seen."""
    lags = numpyro.param("lags", jnp.array([0.5, 0.0]))
    step, noise = positive("step", 0.5), positive("noise", 0.5)

    def body(last: Any, row: Any) -> tuple[Any, None]:
        x = numpyro.sample("x", dist.Normal(lags[0] * last[0] + lags[1] * last[1], step))
        with numpyro.handlers.mask(mask=row[1]):
            numpyro.sample("y", dist.Normal(x, noise), obs=row[0])
        return (x, last[0]), None

    scan(body, (0.0, 0.0), (y, seen))


def autoregression_exact(args: tuple[Any, ...], params: Params) -> float:
    """Return the density of what was seen, a multivariate normal."""
    y, seen = args
    length, lags = y.size, params["lags"]
    back = np.eye(length) - lags[0] * np.eye(length, k=-1) - lags[1] * np.eye(length, k=-2)
    root = float(params["step"]) * np.linalg.inv(back)
    covariance = root @ root.T + float(params["noise"]) ** 2 * np.eye(length)
    rows = np.flatnonzero(seen)
    return log_normal(y[rows].astype(float), 0.0, covariance[np.ix_(rows, rows)])


def autoregression(length: int) -> Case:
    """Return an autoregression of which a fifth was not seen."""
    truth = {"lags": [1.2, -0.4], "step": 0.5, "noise": 0.4}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        x = np.zeros(length + 2)
        for t in range(2, length + 2):
            x[t] = truth["lags"] @ x[[t - 1, t - 2]] + truth["step"] * rng.normal()
        y = x[2:] + truth["noise"] * rng.normal(size=length)
        return y.astype(np.float32), rng.random(length) < 0.8

    return Case(autoregression_model, truth, draw, autoregression_exact)


# -- crossings and fields ---------------------------------------------------------------------


def crossed_model(rows: Any, columns: Any, y: Any, shape: tuple[int, int]) -> None:
    """Two crossed effects."""
    centre = numpyro.param("centre", 0.0)
    sds = numpyro.param("sds", jnp.ones(3), constraint=POSITIVE)
    u = numpyro.sample("u", dist.Normal(0.0, sds[0]).expand([shape[0]]))
    v = numpyro.sample("v", dist.Normal(0.0, sds[1]).expand([shape[1]]))
    numpyro.sample("y", dist.Normal(centre + u[rows] + v[columns], sds[2]), obs=y)


def crossed_exact(args: tuple[Any, ...], params: Params) -> float:
    """Return the density by the matrix determinant lemma."""
    rows, columns, y, shape = args
    sds, size = params["sds"], sum(shape)
    ends, scale = (rows, shape[0] + columns), np.repeat(sds[:2], shape) / sds[2]
    inner = np.zeros((size, size))
    for pair in product(ends, ends):
        np.add.at(inner, pair, 1.0)
    inner *= scale[:, None] * scale
    inner[np.diag_indices(size)] += 1.0
    error = (y.astype(float) - float(params["centre"])) / sds[2]
    projected = scale * sum(np.bincount(each, error, size) for each in ends)
    factor = cho_factor(inner, lower=True)
    square = error @ error - projected @ cho_solve(factor, projected)
    log_det = 2 * np.log(np.diagonal(factor[0])).sum() + 2 * y.size * np.log(sds[2])
    return float(-0.5 * (square + log_det + y.size * np.log(2 * np.pi)))


def crossed(shape: tuple[int, int], num_rows: int) -> Case:
    """Return two crossed effects with normal noise."""
    truth = {"centre": 1.0, "sds": [0.8, 0.5, 1.0]}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        rows, columns = (rng.integers(size, size=num_rows) for size in shape)
        sds = truth["sds"]
        u, v = (sd * rng.normal(size=size) for sd, size in zip(sds[:2], shape, strict=True))
        y = truth["centre"] + u[rows] + v[columns] + sds[2] * rng.normal(size=num_rows)
        return rows, columns, y.astype(np.float32), shape

    return Case(crossed_model, truth, draw, crossed_exact)


def ratings(path: Path) -> Case:
    """Return the students' ratings of lecturers that R's lme4 has as InstEval.

    ``Rscript -e 'write.csv(lme4::InstEval, "InstEval.csv", row.names = FALSE)'`` writes
    them. They are the same for all seeds.
    """
    with path.open() as file:
        names = [name.strip('"') for name in file.readline().strip().split(",")]
        rows = [line.strip().split(",") for line in file]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    ends = [np.unique(columns[name], return_inverse=True)[1] for name in ("s", "d")]
    shape = tuple(int(each.max()) + 1 for each in ends)
    y = np.array(columns["y"], np.float32)
    truth = {"centre": 3.0, "sds": [0.3, 0.5, 1.0]}  # for their shapes
    return Case(crossed_model, truth, lambda rng: (*ends, y, shape), crossed_exact)


def items_model(y: Any) -> None:
    """Persons who answer items, right or wrong."""
    sds = numpyro.param("sds", jnp.ones(2), constraint=POSITIVE)
    persons, items = y.shape
    ability = numpyro.sample("ability", dist.Normal(0.0, sds[0]).expand([persons]))
    ease = numpyro.sample("ease", dist.Normal(0.0, sds[1]).expand([items]))
    numpyro.sample("y", dist.Bernoulli(logits=ability[:, None] + ease), obs=y)


def items(persons: int, num_items: int) -> Case:
    """Return persons who answer items."""
    truth = {"sds": [1.0, 1.5]}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        ability = truth["sds"][0] * rng.normal(size=persons)
        ease = truth["sds"][1] * rng.normal(size=num_items)
        chance = expit(ability[:, None] + ease)
        return ((rng.random(chance.shape) < chance).astype(np.int32),)

    return Case(items_model, truth, draw, None)


def process_kernel(x: Any, scale: Any, reach: Any, library: Any) -> Any:
    """Return the covariance of a smooth function, a little rough for the rounding."""
    far = library.abs(x[:, None] - x) / reach
    smooth = (1 + 3**0.5 * far) * library.exp(-(3**0.5) * far)
    return scale**2 * (smooth + 1e-4 * library.eye(len(x)))


def process_model(x: Any, y: Any) -> None:
    """A Gaussian process seen with noise."""
    scale, reach, noise = (positive(*each) for each in PROCESS_START)
    f = numpyro.sample(
        "f",
        dist.MultivariateNormal(jnp.zeros(len(x)), process_kernel(x, scale, reach, jnp)),
    )
    numpyro.sample("y", dist.Normal(f, noise), obs=y)


PROCESS_START = (("scale", 1.0), ("reach", 1.0), ("noise", 1.0))


def process_exact(args: tuple[Any, ...], params: Params) -> float:
    """Return the density of the data, a multivariate normal."""
    x, y = (np.asarray(each, float) for each in args)
    scale, reach, noise = (float(params[name]) for name, _ in PROCESS_START)
    covariance = process_kernel(x, scale, reach, np) + noise**2 * np.eye(y.size)
    return log_normal(y, 0.0, covariance)


def draw_process(rng: np.random.Generator, size: int, truth: Params) -> tuple[Array, Array]:
    """Draw places and a smooth function there."""
    x = np.sort(rng.uniform(0.0, 20.0, size))
    covariance = process_kernel(x, truth["scale"], truth["reach"], np)
    return x, np.linalg.cholesky(covariance) @ rng.normal(size=size)


def process(size: int) -> Case:
    """Return a Gaussian process seen with noise."""
    truth = {"noise": 0.5, "reach": 1.0, "scale": 1.5}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        x, f = draw_process(rng, size, truth)
        y = f + truth["noise"] * rng.normal(size=size)
        return x.astype(np.float32), y.astype(np.float32)

    return Case(process_model, truth, draw, process_exact)


def process_counts_model(x: Any, y: Any) -> None:
    """Counts whose rate is the exponential of a Gaussian process."""
    base = numpyro.param("base", 0.0)
    scale, reach = (positive(*each) for each in PROCESS_START[:2])
    f = numpyro.sample(
        "f",
        dist.MultivariateNormal(jnp.zeros(len(x)), process_kernel(x, scale, reach, jnp)),
    )
    numpyro.sample("y", dist.Poisson(jnp.exp(base + f)), obs=y)


def process_counts_exact(
    args: tuple[Any, ...], params: Params, num_draws: int = 10_000
) -> float:
    """Sample by importance from a Gaussian at the mode: the same draws for all params."""
    x, y = (np.asarray(each, float) for each in args)
    base, scale, reach = (float(params[name]) for name in ("base", "scale", "reach"))
    root = np.linalg.cholesky(process_kernel(x, scale, reach, np))

    def log_joint(white: Array) -> Array:
        log_rate = base + white @ root.T
        likelihood = (y * log_rate - np.exp(log_rate) - gammaln(y + 1)).sum(-1)
        return likelihood - 0.5 * (white**2).sum(-1)

    mode, arrived = np.zeros(y.size), False
    while not arrived:
        rate = np.exp(base + root @ mode)
        slope = root.T @ (y - rate) - mode
        factor = np.linalg.cholesky(np.eye(y.size) + (root.T * rate) @ root)
        step = cho_solve((factor, True), slope)
        arrived = slope @ step < 1e-12
        while log_joint(mode + step) < log_joint(mode) - 1e-9:
            step = step / 2
        mode = mode + step
    noise = np.random.default_rng(0).normal(size=(num_draws // 2, y.size))
    noise = np.concatenate([noise, -noise])
    white = mode + solve_triangular(factor.T, noise.T).T
    log_weight = log_joint(white) + 0.5 * (noise**2).sum(-1)
    return float(logsumexp(log_weight) - np.log(num_draws) - np.log(np.diag(factor)).sum())


def process_counts(size: int) -> Case:
    """Return counts whose rate is the exponential of a Gaussian process."""
    truth = {"base": 0.5, "reach": 1.0, "scale": 1.0}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        x, f = draw_process(rng, size, truth)
        return x.astype(np.float32), rng.poisson(np.exp(truth["base"] + f))

    return Case(process_counts_model, truth, draw, process_counts_exact)


def lattice_model(y: Any) -> None:
    """Counts on a lattice, neighbours alike. The mass of their ties depends on no param."""
    base = numpyro.param("base", 0.0)
    f = numpyro.sample("f", dist.Normal(0.0, 2.0).expand(y.shape).to_event(2))
    for axis in (0, 1):
        change = jnp.diff(f, axis=axis)
        numpyro.factor(f"ties{axis}", dist.Normal(0.0, 0.4).log_prob(change).sum())
    numpyro.sample("y", dist.Poisson(jnp.exp(base + f)), obs=y)


def lattice(side: int) -> Case:
    """Return counts on a lattice."""
    truth = {"base": 1.0}

    def draw(rng: np.random.Generator) -> tuple[Any, ...]:
        rough = rng.normal(size=(side, side))
        for _ in range(6):
            rough = (rough + np.roll(rough, 1, 0) + np.roll(rough, 1, 1)) / 2
        return (rng.poisson(np.exp(truth["base"] + 0.7 * rough / rough.std())),)

    return Case(lattice_model, truth, draw, None)


CASES = {
    "walk_300": walk(walk_scan, 300),
    "walk_1000": walk(walk_scan, 1_000),
    "walk_3000": walk(walk_scan, 3_000),
    "walk_10000": walk(walk_scan, 10_000),
    "cumsum_300": walk(walk_cumsum, 300),
    "cumsum_1000": walk(walk_cumsum, 1_000),
    "cumsum_10000": walk(walk_cumsum, 10_000),
    "panel_20x50": panel(20, 50),
    "panel_20x100": panel(20, 100),
    "panel_counts_20x50": panel_counts(20, 50),
    "trend_500": trend(500),
    "volatility_300": volatility(300),
    "volatility_1000": volatility(1_000),
    "volatility_3000": volatility(3_000),
    "counts_500": counts(500),
    "logistic_500": logistic(500),
    "autoregression_400": autoregression(400),
    "crossed_200": crossed((150, 50), 1_500),
    "crossed_400": crossed((300, 100), 3_000),
    "crossed_800": crossed((600, 200), 6_000),
    "crossed_1600": crossed((1_200, 400), 12_000),
    "crossed_4100": crossed((2_972, 1_128), 73_421),
    "items_324": items(300, 24),
    "process_500": process(500),
    "process_counts_500": process_counts(500),
    "lattice_225": lattice(15),
    "lattice_400": lattice(20),
    "lattice_900": lattice(30),
    "lattice_1600": lattice(40),
}
