"""Models with hidden states, discrete or moving in time, and their exact likelihoods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from cases import Case, fraction, positive
from numpyro.contrib.control_flow import scan
from quadrature import float32, float64
from scipy import special, stats


def eight_schools() -> Case:
    """Effects of coaching in eight schools (Rubin 1981); their spread has a prior."""
    y, error = float32([28, 8, -3, 7, -1, 1, 18, 12], [15, 10, 16, 11, 9, 11, 10, 18])

    def model(error: Any, y: Any) -> None:
        mu = numpyro.param("mu", 0.0)
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        with numpyro.plate("school", 8):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("y", dist.Normal(mu + tau * z, error), obs=y)

    # tau = 5 tan(a) has the prior of tau where a is uniform.
    angle, width = np.linspace(0, np.pi / 2, 20_001, retstep=True)
    tau = 5 * np.tan(angle[:-1] + width / 2)

    def log_likelihood(params: dict[str, Any]) -> float:
        spread = np.hypot(float64(error)[0], tau[:, None])
        each = stats.norm(params["mu"], spread).logpdf(float64(y)[0]).sum(1)
        return float(special.logsumexp(each) - np.log(tau.size))

    return Case(
        model,
        (error, y),
        lambda z: {"mu": z[0]},
        lambda p: np.array([p["mu"]], float).reshape(1),
        log_likelihood,
        np.array([8.0]),
    )


def local_level() -> Case:
    """A level that walks at random, seen with noise: Kalman's filter is exact."""
    rng = np.random.default_rng(6)
    level = np.cumsum(0.6 * rng.normal(size=50))
    (y,) = float32(level + 1.0 * rng.normal(size=50))

    def model(y: Any) -> None:
        step, noise = positive("step", 1.0), positive("noise", 1.0)

        def move(level: Any, seen: Any) -> tuple[Any, None]:
            level = numpyro.sample("level", dist.Normal(level, step))
            numpyro.sample("y", dist.Normal(level, noise), obs=seen)
            return level, None

        scan(move, 0.0, y)

    def log_likelihood(params: dict[str, Any]) -> float:
        mean, variance, total = 0.0, 0.0, 0.0
        for seen in float64(y)[0]:
            variance += params["step"] ** 2
            whole = variance + params["noise"] ** 2
            total += stats.norm(mean, np.sqrt(whole)).logpdf(seen)
            gain = variance / whole
            mean, variance = mean + gain * (seen - mean), (1 - gain) * variance
        return float(total)

    return Case(
        model,
        (y,),
        lambda z: {"step": np.exp(z[0]), "noise": np.exp(z[1])},
        lambda p: np.log([p["step"], p["noise"]]).reshape(2),
        log_likelihood,
        np.log([0.6, 1.0]),
    )


def stochastic_volatility() -> Case:
    """Returns whose log-variance is an autoregression; the filter runs on a grid."""
    rng = np.random.default_rng(7)
    mean, persistence, spread = -1.0, 0.9, 0.4
    h = np.empty(100)
    h[0] = mean + spread / np.sqrt(1 - persistence**2) * rng.normal()
    for t in range(1, 100):
        h[t] = mean + persistence * (h[t - 1] - mean) + spread * rng.normal()
    (y,) = float32(np.exp(h / 2) * rng.normal(size=100))

    def model(y: Any) -> None:
        mu, spread = numpyro.param("mu", 0.0), positive("spread", 0.3)
        persistence = fraction("persistence", 0.7)
        first = numpyro.sample(
            "first", dist.Normal(mu, spread / jnp.sqrt(1 - persistence**2))
        )
        numpyro.sample("y0", dist.Normal(0.0, jnp.exp(first / 2)), obs=y[0])

        def move(h: Any, seen: Any) -> tuple[Any, None]:
            h = numpyro.sample("h", dist.Normal(mu + persistence * (h - mu), spread))
            numpyro.sample("y", dist.Normal(0.0, jnp.exp(h / 2)), obs=seen)
            return h, None

        scan(move, first, y[1:])

    def log_likelihood(params: dict[str, Any]) -> float:
        mu, phi, s = (float(params[key]) for key in ("mu", "persistence", "spread"))
        whole = s / np.sqrt(1 - phi**2)
        grid, width = np.linspace(mu - 7 * whole, mu + 7 * whole, 601, retstep=True)
        # Rows of the kernel sum to one, also where the grid is coarse for it.
        kernel = stats.norm.pdf(grid, (mu + phi * (grid - mu))[:, None], s)
        kernel /= kernel.sum(1, keepdims=True)
        mass = stats.norm.pdf(grid, mu, whole) * width
        total = 0.0
        for seen in float64(y)[0]:
            mass = mass * stats.norm.pdf(seen, 0.0, np.exp(grid / 2))
            total += np.log(mass.sum())
            mass = (mass / mass.sum()) @ kernel
        return float(total)

    return Case(
        model,
        (y,),
        lambda z: {
            "mu": z[0],
            "spread": np.exp(z[1]),
            "persistence": special.expit(z[2]),
        },
        lambda p: np.array(
            [p["mu"], np.log(p["spread"]), special.logit(p["persistence"])], float
        ),
        log_likelihood,
        np.array([-1.0, -1.0, 2.0]),
    )


def _over_centres(
    log_likelihood_fn: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> float:
    """Integrate over two centres with priors N(-1, 1) and N(2, 1), on a grid."""
    grid, width = np.linspace(-5, 6, 221, retstep=True)
    low, high = (each.ravel() for each in np.meshgrid(grid, grid))
    prior = stats.norm(-1, 1).logpdf(low) + stats.norm(2, 1).logpdf(high)
    whole = prior + log_likelihood_fn(low, high)
    return float(special.logsumexp(whole) + 2 * np.log(width))


def mixture() -> Case:
    """Two groups of unknown centres; which row belongs to which is summed out."""
    rng = np.random.default_rng(8)
    upper = rng.random(60) < 0.35
    (y,) = float32(np.where(upper, 2.0, -1.0) + 0.9 * rng.normal(size=60))

    def model(y: Any) -> None:
        share, noise = fraction("share", 0.5), positive("noise", 1.0)
        prior = dist.Normal(jnp.array([-1.0, 2.0]), 1.0).to_event(1)
        centre = numpyro.sample("centre", prior)
        with numpyro.plate("row", 60):
            which = numpyro.sample("which", dist.Bernoulli(share))
            numpyro.sample("y", dist.Normal(centre[which], noise), obs=y)

    def log_likelihood(params: dict[str, Any]) -> float:
        def rows(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            total = np.zeros_like(low)
            for seen in float64(y)[0]:
                total += np.logaddexp(
                    np.log1p(-params["share"])
                    + stats.norm.logpdf(seen, low, params["noise"]),
                    np.log(params["share"])
                    + stats.norm.logpdf(seen, high, params["noise"]),
                )
            return total

        return _over_centres(rows)

    return Case(model, (y,), *_pack_share("share"), log_likelihood, np.array([-0.6, -0.1]))


def _pack_share(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return how a share and a noise become free numbers and back."""

    def unpack(z: np.ndarray) -> dict[str, Any]:
        return {name: special.expit(z[0]), "noise": np.exp(z[1])}

    def pack(params: dict[str, Any]) -> np.ndarray:
        return np.array([special.logit(params[name]), np.log(params["noise"])], float)

    return unpack, pack


def hidden_markov() -> Case:
    """A chain that stays or turns, of two states with unknown centres."""
    rng = np.random.default_rng(9)
    state = np.cumsum(rng.random(80) < 0.15) % 2
    (y,) = float32(np.where(state == 1, 2.0, -1.0) + 0.9 * rng.normal(size=80))

    def model(y: Any) -> None:
        stay, noise = fraction("stay", 0.6), positive("noise", 1.0)
        prior = dist.Normal(jnp.array([-1.0, 2.0]), 1.0).to_event(1)
        centre = numpyro.sample("centre", prior)
        turn = jnp.array([[stay, 1 - stay], [1 - stay, stay]])

        def move(state: Any, seen: Any) -> tuple[Any, None]:
            state = numpyro.sample("state", dist.Categorical(turn[state]))
            numpyro.sample("y", dist.Normal(centre[state], noise), obs=seen)
            return state, None

        scan(move, 0, y)

    def log_likelihood(params: dict[str, Any]) -> float:
        log_stay, log_turn = np.log(params["stay"]), np.log1p(-params["stay"])

        def forward(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            first, second = np.zeros_like(low), np.full_like(low, -np.inf)
            for seen in float64(y)[0]:
                first, second = (
                    np.logaddexp(here + log_stay, there + log_turn)
                    + stats.norm.logpdf(seen, centre, params["noise"])
                    for here, there, centre in ((first, second, low), (second, first, high))
                )
            return np.logaddexp(first, second)

        return _over_centres(forward)

    return Case(model, (y,), *_pack_share("stay"), log_likelihood, np.array([1.7, -0.1]))


CASES = {
    each.__name__: each
    for each in (
        eight_schools,
        local_level,
        stochastic_volatility,
        mixture,
        hidden_markov,
    )
}
