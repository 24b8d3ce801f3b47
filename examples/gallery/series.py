"""Time series, after NumPyro's examples and its tutorials on forecasting."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64, gaussian_log_density
from jax import lax
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam
from scipy import special, stats

INTEGRATED = "importance sampling from draws of NUTS"
BRIDGED = "bridge from draws of NUTS"
#: Lynx trapped in the Mackenzie river district of Canada, 1821 to 1860 (Elton and
#: Nicholson 1942), in thousands.
LYNX = np.array(
    "269 321 585 871 1475 2821 3928 5943 4950 2577 523 98 184 279 409 2285 2685 3409 1824 "
    "409 151 45 68 213 546 1033 2129 2536 957 361 377 225 360 731 1638 2725 2871 2119 684 "
    "299".split(),
    float,
)


def autoregressive_data() -> Array:
    """Draw a series with two lags."""
    rng = np.random.default_rng(11)
    y = [0.1, 0.3]
    for _ in range(48):
        y.append(0.2 + 1.1 * y[-1] - 0.5 * y[-2] + 0.3 * rng.normal())
    return float32(y)[0]


def lags() -> tuple[Any, Any, Any, Any]:
    """Sample the coefficients of two lags, a constant and the noise."""
    first = numpyro.sample("first", dist.Normal(0.0, 1.0))
    second = numpyro.sample("second", dist.Normal(0.0, 1.0))
    constant = numpyro.sample("constant", dist.Normal(0.0, 1.0))
    return first, second, constant, numpyro.sample("noise", dist.HalfNormal(1.0))


def ar2_scan(y: Array) -> None:
    """Two lags, as a scan whose draws are conditioned on."""
    first, second, constant, noise = lags()

    def step(carry: Any, _: Any) -> Any:
        last, before = carry
        mean = constant + first * last + second * before
        now = numpyro.sample("y", dist.Normal(mean, noise))
        return (now, last), mean

    with handlers.condition(data={"y": jnp.asarray(y[2:])}):
        _, mean = scan(step, (y[1], y[0]), jnp.arange(len(y) - 2))
    numpyro.deterministic("mean", mean)


def ar2_loop(y: Array) -> None:
    """Two lags, as a loop with a site for each time."""
    first, second, constant, noise = lags()
    for t in range(2, 20):
        mean = constant + first * y[t - 1] + second * y[t - 2]
        numpyro.sample(f"y_{t}", dist.Normal(mean, noise), obs=y[t])


def ar2_exact(_: dict[str, Any], end: int | None = None) -> float:
    """Integrate the coefficients in closed form, the noise by quadrature."""
    (y,) = float64(autoregressive_data()[:end])
    x = np.stack([y[1:-1], y[:-2], np.ones(y.size - 2)], -1)

    def log_density(log_noise: Array) -> Array:
        noise = np.exp(log_noise)
        prior = stats.halfnorm.logpdf(noise) + log_noise
        given = [
            gaussian_log_density(y[2:], x @ x.T + sd**2 * np.eye(y.size - 2))
            for sd in noise
        ]
        return prior + given

    return box(log_density, [(-3.0, 1.5)], num_nodes=120)


def seasonal_data() -> Array:
    """Draw a series with a trend and four seasons."""
    rng = np.random.default_rng(12)
    t = np.arange(24)
    season = np.array([0.8, -0.3, -0.9, 0.4])[t % 4]
    return float32(0.05 * t + season + 0.2 * rng.normal(size=24))[0]


def holt_winters(y: Array, num_seasons: int) -> None:
    """Smooth the level, the trend and the seasons exponentially."""
    of_level = numpyro.sample("of_level", dist.Beta(1.0, 1.0))
    of_trend = numpyro.sample("of_trend", dist.Beta(1.0, 1.0))
    of_season = numpyro.sample("of_season", dist.Beta(1.0, 1.0)) * (1 - of_level)
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    trend = numpyro.sample("trend", dist.Normal(0.0, 1.0))
    with numpyro.plate("season", num_seasons):
        seasons = numpyro.sample("seasons", dist.Normal(0.0, 1.0))

    def step(carry: Any, now: Any) -> Any:
        level, trend, seasons = carry
        expected, season = level + trend, seasons[0]
        new = of_level * (now - season) + (1 - of_level) * expected
        slope = of_trend * (new - level) + (1 - of_trend) * trend
        fresh = of_season * (now - expected) + (1 - of_season) * season
        return (new, slope, jnp.append(seasons[1:], fresh)), expected + season

    _, mean = lax.scan(step, (level, trend, seasons), y)
    numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def seasonal_global_trend(y: Array, period: int) -> None:
    """Let trend and seasons grow as powers of the level, with heavy-tailed errors."""
    y = jnp.asarray(y)  # a scan indexes it by time
    scale = jnp.max(y) / 150
    degrees = numpyro.sample("degrees", dist.Uniform(2.0, 20.0))
    power = numpyro.sample("power", dist.Uniform(0.0, 1.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(scale))
    least = dist.TruncatedCauchy(loc=1e-10, scale=scale, low=1e-10)
    offset = numpyro.sample("offset", least)
    trend = numpyro.sample("trend", dist.Cauchy(0.0, scale))
    trend_power = 1.5 * numpyro.sample("trend_power", dist.Beta(1.0, 1.0)) - 0.5
    season_power = numpyro.sample("season_power", dist.Beta(1.0, 1.0))
    of_level = numpyro.sample("of_level", dist.Beta(1.0, 2.0))
    of_season = numpyro.sample("of_season", dist.Uniform(0.0, 1.0))
    seasons = numpyro.sample("seasons", dist.Cauchy(0.0, y[:period] * 0.3))
    num_times = y.shape[0]

    def step(carry: Any, t: Any) -> Any:
        level, seasons, total = carry
        season = seasons[0] * level**season_power
        expected = jnp.clip(level + trend * level**trend_power + season, 0)
        total = total + y[t] - jnp.where(t >= period, y[t - period], 0.0)
        mean = jnp.where(t >= period, total / period, y[t] - season)
        level = jnp.clip(of_level * mean + (1 - of_level) * level, 0)
        fresh = (of_season * (y[t] - level) / season + (1 - of_season)) * seasons[0]
        spread = sigma * expected**power + offset
        numpyro.sample("y", dist.StudentT(degrees, expected, spread))
        return (level, jnp.append(seasons[1:], fresh), total), None

    start = y[0], jnp.append(seasons[1:], seasons[:1]), y[0]
    with handlers.condition(data={"y": y[1:]}):
        scan(step, start, jnp.arange(1, num_times))


def returns(num_times: int = 60) -> Array:
    """Draw returns in percent whose volatility wanders."""
    rng = np.random.default_rng(13)
    log_scale = np.cumsum(0.15 * rng.normal(size=num_times))
    return float32(np.exp(log_scale) * rng.standard_t(8, num_times))[0]


def stochastic_volatility(y: Array) -> None:
    """Heavy-tailed returns whose log-scale is a random walk."""
    step = numpyro.sample("step", dist.Exponential(50.0))
    walk = dist.GaussianRandomWalk(scale=step, num_steps=y.shape[0])
    log_scale = numpyro.sample("log_scale", walk)
    degrees = numpyro.sample("degrees", dist.Exponential(0.1))
    numpyro.sample("y", dist.StudentT(degrees, 0.0, jnp.exp(log_scale)), obs=y)


def stochastic_volatility_non_centred(y: Array) -> None:
    """The same with the walk's steps in units of their scale, as the guide advises."""
    step = numpyro.sample("step", dist.Exponential(50.0))
    steps = numpyro.sample("steps", dist.Normal().expand([y.shape[0]]).to_event(1))
    degrees = numpyro.sample("degrees", dist.Exponential(0.1))
    scale = jnp.exp(jnp.cumsum(step * steps))
    numpyro.sample("y", dist.StudentT(degrees, 0.0, scale), obs=y)


def volatility_given(y: Array, step: float, degrees: Array) -> Array:
    """Integrate the walk on a grid, for many degrees of freedom at once."""
    # the grid has three points for each standard deviation of a step
    width = min(step / 3, 0.05)
    reach = 8 * step * np.sqrt(y.size)
    grid = np.arange(-reach, reach + width, width)
    offsets = np.arange(-np.ceil(8 * step / width), np.ceil(8 * step / width) + 1) * width
    kernel = stats.norm.pdf(offsets, scale=step)
    kernel /= kernel.sum()
    size = grid.size + kernel.size - 1
    transformed = np.fft.rfft(kernel, size)
    start = np.zeros(grid.size)
    start[np.argmin(np.abs(grid))] = 1.0
    mass = np.tile(start, (degrees.size, 1))
    total = np.zeros(degrees.size)
    constant = stats.t.logpdf(0.0, degrees)
    half = offsets.size // 2
    for value in y:
        spread = np.fft.irfft(np.fft.rfft(mass, size) * transformed, size)
        spread = np.maximum(spread[:, half : half + grid.size], 0.0)
        squares = (value * np.exp(-grid)) ** 2
        tail = 0.5 * (degrees[:, None] + 1) * np.log1p(squares / degrees[:, None])
        given = constant[:, None] - tail - grid
        mass = spread * np.exp(given)
        total += np.log(mass.sum(-1))
        mass /= mass.sum(-1, keepdims=True)
    return total


def volatility_exact(_: dict[str, Any]) -> float:
    """Integrate the walk on a grid, then step and degrees of freedom."""
    (y,) = float64(returns())
    steps, step_weights = nodes_on(-14.0, -0.5, 50)
    logs, weights = nodes_on(-3.0, 5.5, 30)
    degrees = np.exp(logs)
    prior = stats.expon(scale=10).logpdf(degrees) + logs + np.log(weights)
    rows = [
        stats.expon(scale=1 / 50).logpdf(np.exp(log_step))
        + log_step
        + special.logsumexp(volatility_given(y, np.exp(log_step), degrees) + prior)
        for log_step in steps
    ]
    return float(special.logsumexp(rows + np.log(step_weights)))


def nodes_on(low: float, high: float, num: int) -> tuple[Array, Array]:
    """Return nodes and weights of Gauss and Legendre on an interval."""
    nodes, weights = np.polynomial.legendre.leggauss(num)
    return low + (high - low) * (nodes + 1) / 2, weights * (high - low) / 2


def travel_data() -> Array:
    """Draw numbers of travellers between three stations, over ten days of four parts."""
    rng = np.random.default_rng(14)
    season = rng.normal(size=(3, 1, 4)) + rng.normal(size=(1, 3, 4))
    pair = rng.normal(size=(3, 3, 1))
    y = np.tile(season, 3) + pair + 0.3 * rng.normal(size=(3, 3, 12))
    return float32(y)[0]


def travel(y: Array) -> None:
    """Sum seasons of origin and destination, a level that drifts, and what pairs have."""
    num, _, num_times = y.shape
    origin, destination = (
        numpyro.plate("origin", num, dim=-3),
        numpyro.plate("to", num, dim=-2),
    )
    drift_scale = numpyro.sample("drift_scale", dist.LogNormal(-3.0, 1.0))
    centred = numpyro.sample("centred", dist.Uniform(0.0, 1.0))
    parts = numpyro.plate("part", 4, dim=-1)
    with origin, parts:
        season_from = numpyro.sample("season_from", dist.Normal(0.0, 5.0))
    with destination, parts:
        season_to = numpyro.sample("season_to", dist.Normal(0.0, 5.0))
    with destination, numpyro.plate("time", num_times, dim=-1):
        with handlers.reparam(config={"drift": LocScaleReparam(centered=centred)}):
            drift = numpyro.sample("drift", dist.Normal(0.0, drift_scale))
    with origin, destination:
        pair = numpyro.sample("pair", dist.Normal(0.0, 1.0))
    with origin:
        scale_from = numpyro.sample("scale_from", dist.LogNormal(-2.0, 1.0))
    with destination:
        scale_to = numpyro.sample("scale_to", dist.LogNormal(-2.0, 1.0))
    season = jnp.tile(season_from + season_to, num_times // 4)
    mean = jnp.cumsum(drift, -1) + season + pair
    with handlers.condition(data={"y": y}):
        numpyro.sample("y", dist.Normal(mean, scale_from + scale_to).to_event(3))


def travel_collapsed(y: Array) -> None:
    """Integrate all but the scales, given which the data are normal."""
    num, _, num_times = y.shape
    drift_scale = numpyro.sample("drift_scale", dist.LogNormal(-3.0, 1.0))
    scale_from = numpyro.sample("scale_from", dist.LogNormal(-2.0, 1.0).expand([num]))
    scale_to = numpyro.sample("scale_to", dist.LogNormal(-2.0, 1.0).expand([num]))
    i, j, t = (each.ravel() for each in np.indices(y.shape))
    same_from, same_to, same_part = (np.equal.outer(x, x) for x in (i, j, t % 4))
    fixed = 25.0 * (same_from & same_part) + 25.0 * (same_to & same_part)
    fixed = fixed + 1.0 * (same_from & same_to)
    walk = np.minimum.outer(t + 1, t + 1) * same_to
    noise = (scale_from[i] + scale_to[j]) ** 2
    covariance = fixed + drift_scale**2 * walk + jnp.diag(noise)
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y.ravel())


def pair_of_series() -> Array:
    """Draw two series, each with lags of both."""
    rng = np.random.default_rng(15)
    first, second = np.array([[0.5, 0.2], [-0.1, 0.4]]), np.array([[0.1, 0.0], [0.1, -0.2]])
    y = [np.zeros(2), np.ones(2)]
    for _ in range(30):
        y.append(first @ y[-1] + second @ y[-2] + 0.4 * rng.normal(size=2))
    return float32(y)[0]


def vector_autoregressive(y: Array) -> None:
    """Two lags of two series with correlated errors."""
    constant = numpyro.sample("constant", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    first = numpyro.sample("first", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    second = numpyro.sample("second", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, concentration=1.0))
    root = scale[..., None] * correlation

    def step(carry: Any, _: Any) -> Any:
        last, before = carry
        mean = constant + first @ last + second @ before
        now = numpyro.sample("y", dist.MultivariateNormal(mean, scale_tril=root))
        return (now, last), None

    with handlers.condition(data={"y": jnp.asarray(y[2:])}):
        scan(step, (y[1], y[0]), jnp.arange(len(y) - 2))


ENTRIES = {
    "ar2_scan": Entry(
        ar2_scan,
        (autoregressive_data(),),
        PAGES + "examples/ar2.html",
        "two lags, as a scan",
        ar2_exact,
        "closed form and quadrature",
        shown="first",
    ),
    "ar2_loop": Entry(
        ar2_loop,
        (autoregressive_data(),),
        PAGES + "examples/ar2.html",
        "two lags, as a loop",
        lambda params: ar2_exact(params, 20),
        "closed form and quadrature",
        shown="first",
    ),
    "var2": Entry(
        vector_autoregressive,
        (pair_of_series(),),
        PAGES + "examples/var2.html",
        "two lags of two series",
        by=BRIDGED,
        shown="scale",
    ),
    "holt_winters": Entry(
        holt_winters,
        (seasonal_data(), 4),
        PAGES + "examples/holt_winters.html",
        "exponential smoothing with seasons",
        by=INTEGRATED,
        shown="noise",
    ),
    "seasonal_global_trend": Entry(
        seasonal_global_trend,
        (float32(LYNX / 1000)[0], 10),
        PAGES + "tutorials/time_series_forecasting.html",
        "lynx, seasonal and global trend",
        by=BRIDGED,
        shown="power",
    ),
    "stochastic_volatility": Entry(
        stochastic_volatility,
        (returns(),),
        PAGES + "examples/stochastic_volatility.html",
        "volatility as a random walk",
        volatility_exact,
        "quadrature on a grid",
        shown="step",
    ),
    "stochastic_volatility_non_centred": Entry(
        stochastic_volatility_non_centred,
        (returns(),),
        PAGES + "examples/stochastic_volatility.html",
        "volatility, steps in units of their scale",
        volatility_exact,
        "quadrature on a grid",
        shown="step",
    ),
    "hierarchical_forecasting": Entry(
        travel,
        (travel_data(),),
        PAGES + "tutorials/hierarchical_forecasting.html",
        "travellers between stations",
        by="closed form and importance sampling",
        collapsed=(travel_collapsed, (travel_data(),)),
        shown="drift_scale",
    ),
}
