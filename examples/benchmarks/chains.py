"""Fit models with large components by default settings, beside exact answers.

Each seed draws a data set and fits it. A run is warm if the object has fitted before, and
with ``--repeats 2`` if it has fitted the same data, whose groups may be part of a program.
Run ``python examples/benchmarks/chains.py --help``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from chain_models import CASES, Case, ratings
from groups import flatten, maximise, unflatten
from jax import random
from records import emit, steps_or_auto

from numpyro_jala import JALAEM


def fit(jala: JALAEM, args: tuple[Any, ...], seed: int, num_steps: int | None) -> dict:
    """Fit once; return what was found."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(seed), num_steps, *args, progress_bar=False)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "log_evidence": float(jala.log_evidence),
        "se": float(jala.log_evidence_se),
        "num_evaluations": jala.diagnostics()["num_evaluations"],
        "reported_shortfall": float(jala.diagnostics()["shortfall"]),
        "warnings": sorted({str(each.message)[:160] for each in caught}),
    }


def compare(jala: JALAEM, case: Case, args: tuple[Any, ...], with_maximum: bool) -> dict:
    """Compare with the exact log-likelihood at the estimate, and with its maximum."""
    assert case.exact is not None
    names = sorted(case.truth)
    like = {name: case.truth[name] for name in names}

    def exact(vector: np.ndarray) -> float:
        with np.errstate(all="ignore"):  # outside of their supports
            return case.exact(args, unflatten(vector, like))

    params = flatten(jala.params, names)
    here = exact(params)
    error = float(jala.log_evidence) - here
    found = {"error": error, "z": error / float(jala.log_evidence_se)}
    if with_maximum:
        best = maximise(exact, params)
        errors = flatten(jala.standard_errors(), names)
        shifts = (params - best.params) / best.standard_errors
        ratios = errors / best.standard_errors - 1
        found |= {
            "shortfall": best.log_likelihood - here,
            "shifts": shifts.round(4).tolist(),
            "se_errors": ratios.round(4).tolist(),
        }
    return found


def measure(
    name: str, case: Case, seeds: list[int], num_steps: int | None, with_maximum: bool
) -> None:
    """Fit a data set for each seed."""
    jala = JALAEM(case.model)
    for seed in seeds:
        args = case.draw(np.random.default_rng(seed))
        record = {"case": name, "seed": seed, **fit(jala, args, seed, num_steps)}
        record["num_latents"] = int(jala.components["sizes"].sum())
        record["params"] = flatten(jala.params, sorted(case.truth)).round(4).tolist()
        if case.exact is not None:
            record |= compare(jala, case, args, with_maximum)
        emit(record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--steps", type=steps_or_auto, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="fits of each data set")
    parser.add_argument("--no-maximum", action="store_true", help="the evidence alone")
    parser.add_argument("--ratings", type=Path, help="InstEval of R's lme4, alone")
    args = parser.parse_args()
    chosen_seeds = range(args.first_seed, args.first_seed + args.seeds)
    chosen_seeds = [seed for seed in chosen_seeds for _ in range(args.repeats)]
    cases = {name: CASES[name] for name in args.case or CASES}
    if args.ratings:
        cases = {"ratings": ratings(args.ratings)}
    for chosen in cases.items():
        measure(*chosen, chosen_seeds, args.steps, not args.no_maximum)
