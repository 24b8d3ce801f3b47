"""Whether to trust what a run found."""

from __future__ import annotations

import numpy as np
from numpyro.distributions import MaskedDistribution
from scipy.special import gammainccinv

from numpyro_jala.engine.state import ANNEAL, EM_STEP, REST
from numpyro_jala.engine.weights import effective_fraction, log_mean_exp
from numpyro_jala.inference.record import Result, Run
from numpyro_jala.results.estimates import estimates, label_entries

#: Error of the log-evidence of one component that is worth a warning; errors of several are
#: independent of each other.
_LARGE_ERROR = 0.5
#: Nats to the maximum that are worth a warning.
_SHORT = 0.1
#: Probability that islands which agree are said to disagree.
_CHANCE = 1e-3
#: Most params that a warning names.
_MOST_NAMED = 5


def _shortfall(result: Result) -> float:
    """Return the nats to the maximum: none without parameters, unknown with many."""
    if result.uncertainty is not None:
        return result.uncertainty.shortfall
    return float("nan") if result.params.size else 0.0


def best_evidence(run: Run) -> tuple[float, float]:
    """Return the log-evidence and its standard error.

    Where no Gaussian meets the posterior, as with thousands of latents, it is the
    recursive estimate. One island alone has no other to bridge to: there it is that one
    too, and the error is that of a mean of independent weights, unknown after a
    resampling.
    """
    result = run.result
    if is_bridged(result):
        return float(result.bridge.log_evidence), float(result.bridge.standard_error)
    if run.fixed.settings.num_islands > 1:
        return _path_evidence(run), _path_error(run)
    seen = [run.infos(stage) for stage in (ANNEAL, EM_STEP)]
    if any(info is not None and info.resampled.any() for info in seen):
        return float(result.recursive[0]), float("nan")
    fraction = float(effective_fraction(result.log_weight)[0])
    size = run.fixed.settings.num_particles
    return float(result.recursive[0]), float(np.sqrt((1 / fraction - 1) / size))


def is_bridged(result: Result) -> bool:
    """Tell whether the bridge to the Gaussians held."""
    ends = (result.bridge.log_evidence, result.bridge.standard_error)
    return bool(np.isfinite(ends).all())


def island_evidence(run: Run) -> np.ndarray:
    """Return what each island says of the log-evidence by itself."""
    result = run.result
    return np.asarray(result.bridge.islands if is_bridged(result) else result.recursive)


def _num_ascents(run: Run) -> int:
    """Count the steps of parameters on the particles, also those of an earlier run."""
    return 0 if run.last_state is None else int(run.last_state.num_steps)


def _path_evidence(run: Run) -> float:
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
    if _num_ascents(run) > 0 or not np.isfinite(recursive).all():
        return float("nan")
    spread = recursive.std(ddof=1)
    num_islands = run.fixed.settings.num_islands
    return float(min(spread, np.sqrt(np.expm1(min(spread**2, 100.0)) / num_islands)))


def num_observations(run: Run) -> float:
    """Count the observations, where one site alone holds them all."""
    sites = [
        site
        for site in run.trace.values()
        if site["type"] == "sample" and site["is_observed"]
    ]
    # Masked and scaled observations do not count as one each.
    if len(sites) != 1 or sites[0]["scale"] is not None:
        return float("nan")
    site = sites[0]
    event_dim = site["fn"].event_dim
    batch = np.shape(site["value"])[: np.ndim(site["value"]) - event_dim]
    is_masked = isinstance(site["fn"], MaskedDistribution)
    size = 0.0 if is_masked else float(np.prod(batch))
    return size if size else float("nan")


def diagnostics(run: Run) -> dict[str, float]:
    """Return numbers that tell whether to trust the result."""
    result = run.result
    log_evidence, error = best_evidence(run)
    seen = [run.infos(s) for s in (ANNEAL, EM_STEP, REST)]
    rows = [info for info in seen if info is not None]
    at_end = rows[-1].ess if rows else np.ones(1)
    recursive = np.asarray(result.recursive, float)
    recursive = recursive[np.isfinite(recursive)]  # an island may have died
    return {
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "recursive_log_evidence": _path_evidence(run),
        "recursive_log_evidence_sd": float(recursive.std(ddof=1))
        if recursive.size > 1
        else 0.0,
        "overlap": float(result.bridge.overlap),
        "shortfall": _shortfall(result),
        "rhat": run.rhat,
        "ess": float(np.median(at_end)),
        "min_ess": float(min((info.ess_lowest.min() for info in rows), default=1.0)),
        "dead_particles": float(sum(info.died.sum() for info in rows)),
        "num_evaluations": float(run.num_evaluations),
    }


def warning_messages(run: Run) -> list[str]:
    """Return a sentence for each thing that a user should doubt."""
    found = diagnostics(run)
    said = [
        f"Of the draws of {name!r} from its prior {share:.0%} are rounded to the edge of "
        f"its support. The mass there is lost, and the log-evidence is not to be trusted. "
        "Turn on double precision (jax_enable_x64), or use another prior."
        for name, share in run.tied_draws.items()
    ]
    if found["ess"] < 0.1:
        said.append(
            f"The effective sample size collapsed: its median at the end is "
            f"{found['ess']:.2f} of an island. Take more particles or a smaller step_size."
        )
    # With few effective draws the means of islands differ by chance alone.
    seen = run.infos(REST)
    lowest = found["ess"] if seen is None else float(seen.ess_lowest[-1])
    chance = _chance_disagreement(run, min(found["ess"], lowest))
    if found["rhat"] ** 2 - 1 > 0.3 + chance:
        said.append(
            f"The islands disagree (r-hat {found['rhat']:.2f}): the particles have not "
            "mixed, or the posterior has several modes. Do not trust the log-evidence; "
            "take more particles, another parametrisation, or another reference."
        )
    said += _evidence_warnings(run, found)
    said += _open_params(run)
    if found["shortfall"] > _SHORT:
        said.append(
            f"The parameters have not converged: the estimate is believed to be "
            f"{found['shortfall']:.2g} nats short of the maximum. Take more steps."
        )
    return said


def _chance_disagreement(run: Run, ess: float) -> float:
    """Return how far the means of islands may differ by chance, in posterior variances.

    The largest of many latents differs by more than one of them.
    """
    settings = run.fixed.settings
    freedom = max(settings.num_islands - 1, 1)
    quantile = 2 * gammainccinv(freedom / 2, _CHANCE / run.fixed.layout.dim)
    return float(quantile / freedom / (max(ess, 1e-3) * settings.num_particles))


def _evidence_warnings(run: Run, found: dict[str, float]) -> list[str]:
    """Return a sentence for each reason to doubt the log-evidence."""
    said = []
    islands = run.fixed.settings.num_islands
    num_components = run.fixed.layout.partition.num_components
    if islands > 1 and np.isnan(found["log_evidence_se"]):
        said.append(
            "The log-evidence could not be estimated afresh, since no Gaussian fitted to "
            "some of the particles meets the others; the number is that found along the "
            "path and is not to be trusted. Take more particles, or run again from these "
            "params with num_steps=0."
        )
    elif found["log_evidence_se"] > _LARGE_ERROR * num_components**0.5:
        said.append(
            f"The log-evidence has standard error {found['log_evidence_se']:.2f} and is "
            "not to be trusted. Take more particles"
            + ("." if is_bridged(run.result) else ", or a larger annealing_effort.")
        )
    elif is_bridged(run.result) and found["overlap"] < 0.05:
        said.append(
            f"Gaussians cover little of the posterior (overlap {found['overlap']:.3f}), so "
            "the log-evidence and its standard error are not to be trusted."
        )
    gap = abs(found["recursive_log_evidence"] - found["log_evidence"])
    error = np.hypot(
        found["recursive_log_evidence_sd"] / islands**0.5, found["log_evidence_se"]
    )
    # Parameters that ascend on the particles bias what is found along the path, each step
    # a little, and where the islands scatter, the logarithm of their mean is low by half
    # the variance.
    num_ascents = _num_ascents(run)
    slack = 5.0 + 0.01 * num_ascents if num_ascents else 1.5
    slack += found["recursive_log_evidence_sd"] ** 2 / 2
    if islands > 1 and num_components == 1 and gap > slack + 2 * error:
        said.append(
            f"The log-evidence along the path, {found['recursive_log_evidence']:.2f}, and "
            f"the one estimated afresh, {found['log_evidence']:.2f}, disagree beyond their "
            "errors. Take more particles, or another reference."
        )
    return said


def _open_params(run: Run) -> list[str]:
    """Return a sentence about parameters of which the data say nothing."""
    result, layout = run.result, run.fixed.layout
    # One island alone cannot tell what the data do not say from noise.
    alone = run.fixed.settings.num_islands == 1
    known = result.uncertainty
    if alone or known is None or known.determined.all():
        return []
    if (
        known.newton_decrement.sum() > _SHORT
    ):  # and what is said then is that it has not converged
        return []
    found = estimates(layout, result.params, result.uncertainty, 0.9)
    open_ = [
        f"{label} (estimated as {float(each.value[index]):.3g})"
        for name, each in found.items()
        for label, index in label_entries(name, each.value)
        if not np.isfinite(each.standard_error[index])
    ]
    if not open_:
        return []
    more = f" and {len(open_) - _MOST_NAMED} more" if len(open_) > _MOST_NAMED else ""
    return [
        f"The data hardly determine {', '.join(open_[:_MOST_NAMED])}{more}, or too few "
        "particles hide it. It may be at the edge of its support. It has no standard "
        "error, and those of the others are as if it were known."
    ]
