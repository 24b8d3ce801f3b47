"""Simulate data sets, fit each by default settings, and count what the intervals cover.

Run ``python examples/benchmarks/intervals.py --help``.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints
from records import emit, steps_or_auto

from numpyro_jala import JALAEM

NUM_GROUPS, PER_GROUP = 40, 8
GROUP = np.repeat(np.arange(NUM_GROUPS), PER_GROUP)
PROB = 0.9


class Study(NamedTuple):
    """A model, the truth, and how to draw data."""

    model: Callable[..., None]
    truth: dict[str, np.ndarray]
    simulate: Callable[[np.random.Generator, np.ndarray], np.ndarray]


def covariate(rng: np.random.Generator) -> np.ndarray:
    """Draw one number for each observation."""
    return rng.normal(size=GROUP.size).astype(np.float32)


def poisson_model(x: Any, y: Any) -> None:
    """Give each group a normal effect on the log of its rate."""
    beta = numpyro.param("beta", jnp.zeros(2))
    sd = numpyro.param("sd", 1.0, constraint=constraints.positive)
    with numpyro.plate("group", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    numpyro.sample("y", dist.Poisson(jnp.exp(beta[0] + beta[1] * x + u[GROUP])), obs=y)


def draw_poisson(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Draw counts at the truth."""
    u = 0.6 * rng.normal(size=NUM_GROUPS)
    return rng.poisson(np.exp(0.5 + 0.4 * x + u[GROUP])).astype(np.float32)


def slope_model(x: Any, y: Any) -> None:
    """Give each group a normal intercept and slope, correlated."""
    beta = numpyro.param("beta", jnp.zeros(2))
    sd = numpyro.param("sd", jnp.ones(2), constraint=constraints.positive)
    rho = numpyro.param("rho", 0.0, constraint=constraints.interval(-1.0, 1.0))
    sigma = numpyro.param("sigma", 1.0, constraint=constraints.positive)
    root = jnp.array([[1.0, 0.0], [rho, jnp.sqrt(1 - rho**2)]])
    with numpyro.plate("group", NUM_GROUPS):
        u = numpyro.sample(
            "u", dist.MultivariateNormal(beta, scale_tril=sd[:, None] * root)
        )
    numpyro.sample("y", dist.Normal(u[GROUP, 0] + u[GROUP, 1] * x, sigma), obs=y)


def draw_slope(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Draw measurements at the truth."""
    root = np.array([[2.0, 0.0], [0.3, np.sqrt(0.91)]])
    u = np.array([3.0, -1.0]) + rng.normal(size=(NUM_GROUPS, 2)) @ root.T
    noise = 1.5 * rng.normal(size=GROUP.size)
    return (u[GROUP, 0] + u[GROUP, 1] * x + noise).astype(np.float32)


STUDIES = {
    "poisson": Study(
        poisson_model,
        {"beta": np.array([0.5, 0.4]), "sd": np.array(0.6)},
        draw_poisson,
    ),
    "slope": Study(
        slope_model,
        {
            "beta": np.array([3.0, -1.0]),
            "sd": np.array([2.0, 1.0]),
            "rho": np.array(0.3),
            "sigma": np.array(1.5),
        },
        draw_slope,
    ),
}


def measure(name: str, num_steps: int | None, seeds: range) -> None:
    """Fit one data set for each seed."""
    study = STUDIES[name]
    jala = JALAEM(study.model)
    covered: dict[str, list[np.ndarray]] = {site: [] for site in study.truth}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        x = covariate(rng)
        y = study.simulate(rng, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jala.run(random.key(seed), num_steps, x, y, progress_bar=False)
        intervals = jala.confidence_intervals(PROB)
        for site, truth in study.truth.items():
            low, high = np.moveaxis(intervals[site], -1, 0)
            covered[site].append((low <= truth) & (truth <= high))
        emit(
            {
                "study": name,
                "seed": seed,
                "shortfall": float(jala.diagnostics()["shortfall"]),
                "covered": {site: each[-1].tolist() for site, each in covered.items()},
            }
        )
    shares = {site: np.mean(each, axis=0).tolist() for site, each in covered.items()}
    emit({"summary": True, "study": name, "num_sets": len(seeds), "coverage": shares})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=STUDIES, action="append")
    parser.add_argument("--steps", type=steps_or_auto, default=None)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    for chosen in args.study or STUDIES:
        measure(chosen, args.steps, range(args.first_seed, args.first_seed + args.seeds))
