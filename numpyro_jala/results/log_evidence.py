"""The log-evidence that a run reports, and when there is none to report."""

from __future__ import annotations

import numpy as np

from numpyro_jala.engine.state import ANNEAL, EM_STEP, REST
from numpyro_jala.engine.weights import effective_fraction, log_mean_exp
from numpyro_jala.inference.record import Result, Run

#: Effective particles of an island below which there is no estimate.
_FEWEST_EFFECTIVE = 2.0
#: How far islands may disagree and the log-evidence be a number: where Gaussians do not
#: cover the posterior, and where they do, as with well separated modes.
_MOST_RHAT, _MOST_RHAT_COVERED = 3.0, 100.0
#: Share of the posterior that Gaussians should cover.
LEAST_OVERLAP = 0.05


def raw_evidence(run: Run) -> tuple[float, float]:
    """Return the log-evidence and its standard error, whether or not to be trusted.

    Where no Gaussian meets the posterior, as with thousands of latents, it is the
    recursive estimate. One island alone has no other to bridge to: there it is that one
    too, and the error is that of a mean of independent weights, unknown after a
    resampling.
    """
    result = run.result
    if is_bridged(result):
        return float(result.bridge.log_evidence), float(result.bridge.standard_error)
    if run.fixed.settings.num_islands > 1:
        return path_evidence(run), _path_error(run)
    seen = [run.infos(stage) for stage in (ANNEAL, EM_STEP)]
    if any(info is not None and info.resampled.any() for info in seen):
        return float(result.recursive[0]), float("nan")
    fraction = float(effective_fraction(result.log_weight)[0])
    size = run.fixed.settings.num_particles
    return float(result.recursive[0]), float(np.sqrt((1 / fraction - 1) / size))


def best_evidence(run: Run) -> tuple[float, float]:
    """Return the log-evidence and its standard error, NaN if the run has failed."""
    if failure(run):
        return float("nan"), float("nan")
    return raw_evidence(run)


def failure(run: Run) -> str:
    """Say by which of its own figures a run has failed; empty if it has not."""
    settings = run.fixed.settings
    value, error = raw_evidence(run)
    ess, overlap = final_ess(run), float(run.result.bridge.overlap)
    most = _MOST_RHAT_COVERED if overlap >= LEAST_OVERLAP else _MOST_RHAT
    if run.death:
        return "nearly every particle died"
    if not np.isfinite(value):
        return "the density has no finite mass at the particles"
    if settings.num_islands > 1 and np.isnan(error):
        return "no Gaussian fitted to some of the particles meets the others"
    if settings.num_islands > 1 and ess * settings.num_particles < _FEWEST_EFFECTIVE:
        return f"one particle carries the weight of its island (ESS {ess:.2g})"
    if not run.rhat <= most:  # true for NaN as well
        return f"the islands are in different places (r-hat {short(run.rhat)})"
    return ""


def short(value: float) -> str:
    """Print a number of any size in a few characters."""
    return f"{value:.2f}" if abs(value) < 1_000 else f"{value:.1e}"


def final_ess(run: Run) -> float:
    """Return the median effective sample size at the end, as a share of an island."""
    for stage in (REST, EM_STEP, ANNEAL):
        info = run.infos(stage)
        if info is not None:
            return float(np.median(info.ess))
    return 1.0


def is_bridged(result: Result) -> bool:
    """Tell whether the bridge to the Gaussians held."""
    ends = (result.bridge.log_evidence, result.bridge.standard_error)
    return bool(np.isfinite(ends).all())


def island_evidence(run: Run) -> np.ndarray:
    """Return what each island says of the log-evidence by itself."""
    result = run.result
    return np.asarray(result.bridge.islands if is_bridged(result) else result.recursive)


def num_ascents(run: Run) -> int:
    """Count the steps of parameters on the particles, also those of an earlier run."""
    return 0 if run.last_state is None else int(run.last_state.num_steps)


def path_evidence(run: Run) -> float:
    """Return the log-evidence along the path, of all islands.

    That of several components has the bias of its logarithms taken out in each island.
    """
    recursive = run.result.recursive
    if run.fixed.layout.partition.is_joint:
        return float(log_mean_exp(recursive))
    return float(np.mean(recursive))


def _path_error(run: Run) -> float:
    """Return the error of the evidence along the path, by the spread of the islands.

    As if each island's were lognormal, and not more than the spread itself. Unknown once
    parameters have ascended on the particles, which biases it.
    """
    recursive = np.asarray(run.result.recursive, np.float64)
    if num_ascents(run) > 0 or not np.isfinite(recursive).all():
        return float("nan")
    spread = recursive.std(ddof=1)
    num_islands = run.fixed.settings.num_islands
    return float(min(spread, np.sqrt(np.expm1(min(spread**2, 100.0)) / num_islands)))
