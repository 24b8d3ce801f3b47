"""Compare ways to the maximum of the likelihood: shortfall in nats against seconds.

The ways take turns, seed by seed, in one process; the first run of each is its cold one.
PGD, SOUL, SVI and a small JALAEM have a grid of settings each, which stands for tuning by
hand: their figure is that of the quickest setting that gets there. JSON lines; run
``python examples/benchmarks/estimation.py --help``.
"""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import fits
import jax
import numpy as np
import optax
from fits import Fit
from jax import lax, random
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from problems import Params
from records import emit

from numpyro_jala import JALAEM, PGD, SOUL

Way = Callable[[int], Params]
PROBLEMS = ("logistic", "poisson")
ENOUGH = 0.01  # nats


def runs_of(fitter: Any, fit: Fit, num_steps: int) -> Way:
    """Return how a fitter of this package comes to its params."""

    def run(seed: int) -> Params:
        fitter.run(random.key(seed), num_steps, *fit.args, progress_bar=False)
        return fitter.params

    return run


def jala(fit: Fit, num_steps: int) -> Way:
    """Run the package with its defaults."""
    return runs_of(JALAEM(fit.model), fit, num_steps)


def small_jala(
    fit: Fit, num_particles: int, num_steps: int, preconditioner: str = "auto"
) -> Way:
    """Run the package with fewer particles than by default."""
    small = JALAEM(fit.model, num_particles=num_particles, preconditioner=preconditioner)
    return runs_of(small, fit, num_steps)


def baseline(
    kind: type, fit: Fit, num_particles: int, step_size: float, rate: float, num_steps: int
) -> Way:
    """Run PGD or SOUL, the params moved by Adam."""
    optim = optax.adam(rate)
    theirs = kind(fit.model, optim, step_size=step_size, num_particles=num_particles)
    return runs_of(theirs, fit, num_steps)


def svi(guide_fn: Callable[..., Any], fit: Fit, rate: float, num_steps: int) -> Way:
    """Maximise the ELBO with Adam, in one compiled loop."""
    inference = SVI(fit.model, guide_fn(fit.model), optax.adam(rate), Trace_ELBO())

    @jax.jit
    def train(rng_key: Any, args: Any) -> Any:
        def step(_: int, state: Any) -> Any:
            return inference.update(state, *args)[0]

        state = lax.fori_loop(0, num_steps, step, inference.init(rng_key, *args))
        return inference.get_params(state)

    return lambda seed: train(random.key(seed), fit.args)


def grid(*choices: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return every combination."""
    return list(itertools.product(*choices))


_BASELINE_SETTINGS = grid((10, 100), (1e-3, 1e-2), (1e-2, 1e-1), (300, 1_000, 3_000))
_SMALL_SETTINGS = [*grid((64, 128), (10, 25)), (64, 10, "diagonal")]
_SVI_SETTINGS = grid((1e-2, 1e-1), (300, 1_000, 3_000, 10_000))
#: Ways, and the settings to try.
WAYS: dict[str, tuple[Callable[..., Way], list[tuple[Any, ...]]]] = {
    "jala": (jala, [(25,), (50,), (100,)]),
    "small_jala": (small_jala, _SMALL_SETTINGS),
    "pgd": (partial(baseline, PGD), _BASELINE_SETTINGS),
    "soul": (partial(baseline, SOUL), _BASELINE_SETTINGS),
    "svi_normal": (partial(svi, AutoNormal), _SVI_SETTINGS),
    "svi_multivariate": (partial(svi, AutoMultivariateNormal), _SVI_SETTINGS),
}


def measure(way: Way, seed: int, fit: Fit) -> dict[str, float]:
    """Run once; return the shortfall and the seconds."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            params = jax.block_until_ready(way(seed))
        except RuntimeError:  # it ran away
            return {"shortfall": float("inf"), "seconds": time.perf_counter() - start}
    seconds = time.perf_counter() - start
    value = fit.log_likelihood_fn({k: np.asarray(v) for k, v in params.items()})
    return {"shortfall": fit.maximum - value, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="*", choices=PROBLEMS, default=PROBLEMS)
    parser.add_argument("--ways", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    for problem in options.problems:
        fit = getattr(fits, problem)()
        runs = {(n, s): WAYS[n][0](fit, *s) for n in options.ways for s in WAYS[n][1]}
        for seed in range(options.seeds + 1):
            for name, setting in list(runs):
                found = measure(runs[name, setting], seed, fit)
                where = {"problem": problem, "way": name, "setting": setting, "seed": seed}
                emit({**where, "is_cold": seed == 0, **found})
                # One that is far off is not run again.
                if not found["shortfall"] < (1.0 if seed == 0 else 10 * ENOUGH):
                    del runs[name, setting]


if __name__ == "__main__":
    main()
