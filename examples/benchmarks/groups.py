"""Fit models of independent groups by default settings, and compare with quadrature.

Each seed draws a data set and fits it. A run is warm if the object has fitted before.
Run ``python examples/benchmarks/groups.py --help``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from group_models import STUDIES, Array, Data, Params, Study, arrange, draw
from jax import random
from quadrature import mixed_difference
from records import emit, finite, spread, steps_or_auto

from numpyro_jala import JALAEM

#: Of differences, relative to a param.
STEP = 3e-4


class Maximum(NamedTuple):
    """Where a log-likelihood is largest."""

    params: Array  # (num_params,)
    standard_errors: Array  # (num_params,)
    log_likelihood: float


def flatten(params: dict[str, Any], names: Any) -> Array:
    """Put the params in one vector."""
    return np.concatenate([np.ravel(np.asarray(params[name], float)) for name in names])


def unflatten(vector: Array, like: dict[str, Any]) -> Params:
    """Undo :func:`flatten`."""
    sizes = [np.size(value) for value in like.values()]
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    pairs = zip(like.items(), parts, strict=True)
    return {name: part.reshape(np.shape(value)) for (name, value), part in pairs}


def hessian(fn: Callable[[Array], float], point: Array, steps: Array) -> Array:
    """Difference a function twice; columns of ``steps`` are directions."""
    found = np.zeros((point.size, point.size))
    for i, a in enumerate(steps):
        for j, b in enumerate(steps[: i + 1]):
            mixed = mixed_difference(fn, point, a / 2, b / 2) * 4
            found[i, j] = found[j, i] = mixed / (a.sum() * b.sum())
    return found


def maximise(fn: Callable[[Array], float], start: Array, num_steps: int = 30) -> Maximum:
    """Climb by Newton's method, with the curvature found afresh where it is slow."""
    steps = np.diag(STEP * np.maximum(np.abs(start), 0.3))
    point, here, last = start, fn(start), np.inf
    covariance = np.linalg.inv(-hessian(fn, point, steps))
    for _ in range(num_steps):
        slope = np.array([(fn(point + a) - fn(point - a)) / (2 * a.sum()) for a in steps])
        if 0.5 * slope @ covariance @ slope > 0.1 * last:
            covariance = np.linalg.inv(-hessian(fn, point, steps))
        move = covariance @ slope
        last = 0.5 * slope @ move  # nats to the maximum
        if last < 0:
            raise RuntimeError(f"The log-likelihood is not concave at {point}.")
        if last < 1e-7:
            break
        while not (there := fn(point + move)) > here - 1e-7:  # NaN outside of supports
            move = move / 2
        point, here = point + move, there
    else:
        raise RuntimeError(f"No maximum was found in {num_steps} steps from {start}.")
    covariance = np.linalg.inv(-hessian(fn, point, steps))
    return Maximum(point, np.sqrt(np.diag(covariance)), here)


def likelihood(study: Study, data: Data) -> Callable[..., float]:
    """Return the log-likelihood as a function of a vector of params."""

    def fn(vector: Array, width: float = study.width) -> float:
        with np.errstate(all="ignore"):  # outside of their supports
            return study.exact(data, unflatten(vector, study.truth), width)

    return fn


def fit(jala: JALAEM, study: Study, data: Data, seed: int, num_steps: int | None) -> dict:
    """Fit once; return what was found, beside the log-likelihood by quadrature."""
    args = arrange(study, data)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(seed), num_steps, *args, progress_bar=False)
    seconds = time.perf_counter() - start
    params = flatten(jala.params, study.truth)
    fn = likelihood(study, data)
    exact = fn(params)
    error = jala.log_evidence - exact
    return {
        "seed": seed,
        "seconds": round(seconds, 2),
        "error": error,
        "se": jala.log_evidence_se,
        "z": error / jala.log_evidence_se,
        "log_likelihood": exact,
        "num_components": int(jala.components["num_components"]),
        "num_particles": jala.num_particles,
        "reported_shortfall": float(jala.diagnostics()["shortfall"]),
        "params": params.tolist(),
        "warnings": sorted({str(each.message)[:120] for each in caught}),
    }


def compare(jala: JALAEM, study: Study, data: Data, record: dict) -> dict:
    """Compare the estimate with the maximum by quadrature, at two resolutions."""
    fn = likelihood(study, data)
    best = maximise(fn, flatten(study.truth, study.truth))
    shifts = (np.array(record["params"]) - best.params) / best.standard_errors
    errors = flatten(jala.standard_errors(), study.truth)
    return {
        "worst_shift": np.abs(shifts).max(),
        "worst_se_error": np.abs(errors / best.standard_errors - 1).max(),
        "error_at_maximum": jala.log_evidence - best.log_likelihood,
        "shortfall": best.log_likelihood - record["log_likelihood"],
        "quadrature_error": fn(best.params) - fn(best.params, 0.8 * study.width),
        "shifts": shifts.round(4).tolist(),
        "se_errors": (errors / best.standard_errors - 1).round(4).tolist(),
        "maximum": best.params.tolist(),
    }


def measure(name: str, seeds: range, num_steps: int | None, with_maximum: bool) -> None:
    """Fit a data set for each seed, and sum up."""
    study = STUDIES[name]
    jala = JALAEM(study.model)
    records = []
    for seed in seeds:
        data = draw(study, seed)
        record = fit(jala, study, data, seed, num_steps)
        if with_maximum:
            record |= compare(jala, study, data, record)
        records.append(record)
        emit({"study": name, **record})
    z = finite(records, "z")
    warm = finite(records[1:], "seconds")
    summary = {
        "summary": True,
        "study": name,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "num_seeds": len(records),
        "num_steps": num_steps,
        "mean_z": float(z.mean()),
        "sd_z": spread(z),
        "worst_z": float(np.abs(z).max()),
        "median_se": float(np.median(finite(records, "se"))),
        "worst_se": float(finite(records, "se").max()),
        "first_s": records[0]["seconds"],
        "median_warm_s": float(np.median(warm)) if warm.size else None,
        "num_warned": sum(bool(record["warnings"]) for record in records),
    }
    if with_maximum:
        keys = ("worst_shift", "worst_se_error", "shortfall", "quadrature_error")
        summary |= {key: float(np.abs(finite(records, key)).max()) for key in keys}
    emit(summary)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", choices=STUDIES, action="append")
    parser.add_argument("--steps", type=steps_or_auto, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-maximum", action="store_true", help="the evidence alone")
    args = parser.parse_args()
    chosen_seeds = range(args.first_seed, args.first_seed + args.seeds)
    for chosen in args.study or STUDIES:
        measure(chosen, chosen_seeds, args.steps, not args.no_maximum)
