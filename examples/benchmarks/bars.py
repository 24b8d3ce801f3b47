"""Measure JALAEM against exact answers, one JSON record per seed and a summary.

Run ``python examples/benchmarks/bars.py --help`` for the list of measurements.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import fits
import jax
import numpy as np
import numpyro
import optax
import problems
from jax import random
from multimodal import MULTIMODAL
from records import (
    Record,
    emit,
    summarise_components,
    summarise_cost,
    summarise_errors,
    summarise_ratios,
    summarise_shortfalls,
)

from numpyro_jala import JALAEM
from numpyro_jala.inference.programs import log_evidence

EVIDENCE_PROBLEMS = ("gaussian", "wisconsin", "student", "eight_schools", "glmm")
ENVIRONMENT = {"jax": jax.__version__, "numpyro": numpyro.__version__}


def measure_run(
    jala: JALAEM,
    run_fn: Callable[[int], Any],
    measure_fn: Callable[[Any], Record],
    seed: int,
) -> Record:
    """Time one run, and compare it with the exact answer."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        idata = run_fn(seed)
        seconds = time.perf_counter() - start
    record = {"seed": seed, **measure_fn(idata)}
    record["z"] = record["error"] / record["se"] if record["se"] else float("nan")
    record["num_evaluations"] = float(jala.diagnostics()["num_evaluations"])
    record["seconds"] = seconds
    texts = sorted({f"{each.category.__name__}: {each.message}" for each in caught})
    return record | {"warnings": texts}


def sweep(
    label: Record,
    jala: JALAEM,
    run_fn: Callable[[int], Any],
    measure_fn: Callable[[Any], Record],
    seeds: range,
    extra_fn: Callable[[list[Record]], Record] = lambda records: {},
) -> None:
    """Run every seed on one instance, so that all but the first are compiled."""
    records = []
    for seed in seeds:
        records.append(measure_run(jala, run_fn, measure_fn, seed))
        emit(label | records[-1])
    summary = summarise_errors(records) | summarise_cost(records) | extra_fn(records)
    device = jax.devices()[0].device_kind
    emit({"summary": True} | label | ENVIRONMENT | {"device": device} | summary)


def sweep_evidence(
    name: str,
    seeds: range,
    extra_fn: Callable[[list[Record]], Record] = lambda records: {},
    **options: Any,
) -> None:
    """Estimate the evidence of a model without params."""
    problem = MULTIMODAL[name]() if name in MULTIMODAL else getattr(problems, name)()
    jala = JALAEM(problem.model, **options)
    label = {"problem": name, "exact": problem.log_evidence, **options}
    label["exact_se"] = problem.log_evidence_se

    def run(seed: int) -> Any:
        return jala.run(random.key(seed), 0, *problem.args, progress_bar=False)

    def measure(idata: Any) -> Record:
        recursive = float(jala.diagnostics()["recursive_log_evidence"])
        return {
            "error": float(jala.log_evidence) - problem.log_evidence,
            "se": float(jala.log_evidence_se),
            "recursive_error": recursive - problem.log_evidence,
        }

    sweep(label, jala, run, measure, seeds, extra_fn)


def sweep_fit(name: str, label: Record, args: argparse.Namespace, **options: Any) -> None:
    """Fit the params; compare the evidence with the exact likelihood there."""
    problem = getattr(fits, name)()
    jala = JALAEM(problem.model)
    label = {"problem": name, "steps": args.steps, "maximum": problem.maximum, **label}

    def run(seed: int) -> Any:
        key = random.key(seed)
        return jala.run(key, args.steps, *problem.args, progress_bar=False, **options)

    def measure(idata: Any) -> Record:
        exact = problem.log_likelihood_fn(jala.params)
        return {
            "error": float(jala.log_evidence) - exact,
            "se": float(jala.log_evidence_se),
            "shortfall": problem.maximum - exact,
            "reported_shortfall": float(jala.diagnostics()["shortfall"]),
        }

    sweep(label, jala, run, measure, args.seeds, summarise_shortfalls)


def sweep_exactness(num_particles: int, step_size: float, args: argparse.Namespace) -> None:
    """Follow the paper: exact draws, a fixed isotropic step, and no resampling."""
    jala = JALAEM(
        problems.gaussian_param_model,
        optax.adam(5e-3),
        num_particles=num_particles,
        num_islands=1,
        step_size=step_size,
        preconditioner=None,
        components="joint",
        ess_threshold=0,
    )
    start = {"log_sigma2": 1.0, "log_alpha": 1.0}
    data, exact_start = (
        problems.regression_data(),
        problems.gaussian_log_evidence(start),
    )

    def run(seed: int) -> Any:
        draws = problems.gaussian_posterior(seed, num_particles, start)
        known = {"init_particles": {"w": draws}, "init_log_evidence": exact_start}
        return jala.run(random.key(seed), args.steps, *data, progress_bar=False, **known)

    def measure(idata: Any) -> Record:
        trace = idata["em_trace"]
        last = {name: float(trace[name].values[-1]) for name in (*start, "log_evidence")}
        error = last.pop("log_evidence") - problems.gaussian_log_evidence(last)
        return {
            "error": error,
            "se": float(trace["log_evidence_se"].values[-1]),
            **last,
        }

    label = {"problem": "gaussian", "steps": args.steps}
    label |= {"num_particles": num_particles, "step_size": step_size}
    sweep(label, jala, run, measure, args.seeds)


def exactness(args: argparse.Namespace) -> None:
    """Compare the recursive evidence with the analytic one, as the paper does."""
    for num_particles, step_size in ((50, 5e-5), (1000, 5e-4)):
        sweep_exactness(num_particles, step_size, args)


def unbiased(args: argparse.Namespace) -> None:
    """Average Z_hat / Z with few particles."""
    for name in ("gaussian", "student", "glmm10"):
        sizes = {"num_particles": 128, "num_islands": 8}
        sweep_evidence(name, args.seeds, summarise_ratios, **sizes)


def components(args: argparse.Namespace) -> None:
    """Average Z_hat / Z of each of 30 components, with four particles in an island."""
    y, exact = problems.gamma_poisson()
    jala = JALAEM(problems.gamma_poisson_model, num_particles=32, num_islands=8)
    ratios: dict[str, list[Any]] = {"annealed": [], "final": []}
    for seed in args.seeds:
        jala.run(random.key(seed), 0, y, progress_bar=False)
        order = jala.components["rate"].ravel()
        along = np.asarray(log_evidence(jala.last_state))[:, order]
        ratios["annealed"].append(np.exp(along - exact).mean(0))
        final = jala._run.result.by_component.log_evidence[order]
        ratios["final"].append(np.exp(final - exact))
    for estimate, rows in ratios.items():
        emit({"summary": True, "estimate": estimate} | summarise_components(np.array(rows)))


def evidence(args: argparse.Namespace) -> None:
    """Estimate the evidence of one problem, by default settings."""
    sweep_evidence(args.problem, args.seeds, reference=args.reference)


def sleepstudy(args: argparse.Namespace) -> None:
    """Fit lme4's random-slope model from a near or an absurd start."""
    init_params = fits.FAR_START if args.start == "far" else None
    sweep_fit("sleepstudy", {"start": args.start}, args, init_params=init_params)


def bernoulli(args: argparse.Namespace) -> None:
    """Fit binary data with much missing information."""
    sweep_fit("bernoulli", {}, args)


def corners(args: argparse.Namespace) -> None:
    """Try two models that are hard, and see whether the user is warned."""
    for name in ("beta_binomial", "funnel"):
        sweep_evidence(name, args.seeds)


def modes(args: argparse.Namespace) -> None:
    """Weigh modes of unlike width, and clusters whose labels may be exchanged."""
    for name in MULTIMODAL:
        sweep_evidence(name, args.seeds)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    defaults = {exactness: 40, unbiased: 100, evidence: 20, sleepstudy: 5}
    defaults |= {bernoulli: 3, corners: 10, components: 100, modes: 20}
    subparsers = {}
    for command, seeds in defaults.items():
        subparsers[command] = commands.add_parser(command.__name__, help=command.__doc__)
        subparsers[command].set_defaults(command=command)
        subparsers[command].set_defaults(seeds=seeds)
    calibration = commands.add_parser("calibration", help="Like evidence, over more seeds.")
    calibration.set_defaults(command=evidence, seeds=100)
    for each in (*subparsers.values(), calibration):
        each.add_argument("--seeds", type=int)
        each.add_argument("--first-seed", type=int, default=0)
    for each in (subparsers[evidence], calibration):
        each.add_argument("--problem", choices=EVIDENCE_PROBLEMS, default="gaussian")
        each.add_argument("--reference", choices=("prior", "laplace"), default="prior")
    for command, steps in ((exactness, 250), (sleepstudy, 200), (bernoulli, 400)):
        subparsers[command].add_argument("--steps", type=int, default=steps)
    subparsers[sleepstudy].add_argument("--start", choices=("near", "far"), default="near")
    args = parser.parse_args()
    args.seeds = range(args.first_seed, args.first_seed + args.seeds)
    return args


if __name__ == "__main__":
    arguments = parse()
    arguments.command(arguments)
