"""Whether to trust what a run found."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import MaskedDistribution
from scipy.special import gammainccinv

from numpyro_jala.engine.state import ANNEAL, EM_STEP, REST
from numpyro_jala.inference.record import Result, Run
from numpyro_jala.inference.rest import FORGOTTEN
from numpyro_jala.results.convergence import last_rise, shortfall
from numpyro_jala.results.edges import edge_warnings
from numpyro_jala.results.estimates import estimates, label_entries
from numpyro_jala.results.log_evidence import (
    LEAST_OVERLAP,
    best_evidence,
    failure,
    final_ess,
    is_bridged,
    num_ascents,
    path_evidence,
    raw_evidence,
    short,
)

#: Error of the log-evidence of one component that is worth a warning; errors of several are
#: independent of each other.
_LARGE_ERROR = 0.5
#: Nats to the maximum that are worth a warning.
_SHORT = 0.1
#: Share of the first deviations that is worth a warning where rest ends before they are gone.
_UNSETTLED = 0.2
#: Monte Carlo error of a standard error, as a share of it, that is worth a warning.
_ROUGH = 0.1
#: Probability that islands which agree are said to disagree.
_CHANCE = 1e-3
#: Most params that a warning names.
_MOST_NAMED = 5


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


#: From this Pareto k on weights may have no mean. Below, particles tell what draws reach too
#: rarely: over 150 runs of a Gamma latent, with k up to 1.07, z was standard normal.
_NO_MEAN = 1.0


def diagnostics(run: Run) -> dict[str, float]:
    """Return numbers that tell whether to trust the result."""
    result = run.result
    log_evidence, error = best_evidence(run)
    seen = [run.infos(s) for s in (ANNEAL, EM_STEP, REST)]
    rows = [info for info in seen if info is not None]
    recursive = np.asarray(result.recursive, float)
    recursive = recursive[np.isfinite(recursive)]  # an island may have died
    return {
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "raw_log_evidence": raw_evidence(run)[0],
        "recursive_log_evidence": path_evidence(run),
        "recursive_log_evidence_sd": float(recursive.std(ddof=1))
        if recursive.size > 1
        else 0.0,
        "overlap": float(result.bridge.overlap),
        **_two_estimates(result),
        "num_steps": float(run.count(EM_STEP)),
        "shortfall": shortfall(result),
        "last_rise": float("nan") if (rise := last_rise(run)) is None else rise.nats,
        "rhat": run.rhat,
        "unsettled": float("nan") if run.unsettled is None else run.unsettled.share,
        "ess": final_ess(run),
        "min_ess": float(min((info.ess_lowest.min() for info in rows), default=1.0)),
        "dead_particles": float(sum(info.died.sum() for info in rows)),
        "num_evaluations": float(run.num_evaluations),
    }


def _two_estimates(result: Result) -> dict[str, float]:
    """Return what a bridge and importance sampling say; NaN where only one was asked."""
    pair, nan = result.compared, float("nan")
    return {
        "bridge_log_evidence": nan if pair is None else float(pair.bridge.log_evidence),
        "importance_log_evidence": nan if pair is None else float(pair.drawn.log_evidence),
        "pareto_k": nan if pair is None else pair.pareto_shape,
    }


def warning_messages(run: Run) -> list[str]:
    """Return a sentence for each thing that a user should doubt."""
    found = diagnostics(run)
    said = edge_warnings(run)
    reason = failure(run)
    if run.death:
        said.append(run.death)
    if reason:
        said.append(
            f"The log-evidence is NaN, since {reason}. What was found, "
            f"{short(found['raw_log_evidence'])}, is kept as raw_log_evidence in "
            "diagnostics() and is not to be trusted."
        )
    said += _particle_warnings(run, found)
    said += _evidence_warnings(run, found)
    said += _weight_warnings(run, found)
    said += _open_params(run) + _rough_errors(run)
    return said + _convergence_warnings(run, found)


def _particle_warnings(run: Run, found: dict[str, float]) -> list[str]:
    """Return a sentence for each reason to doubt the particles."""
    said = []
    if found["ess"] < 0.1:
        step_size = run.fixed.settings.step_size
        smaller = "" if step_size is None else f", or a step_size below {step_size:g}"
        said.append(
            f"The effective sample size collapsed: its median at the end is "
            f"{found['ess']:.2f} of an island. Take more particles{smaller}."
        )
    # With few effective draws the means of islands differ by chance alone.
    seen = run.infos(REST)
    lowest = found["ess"] if seen is None else float(seen.ess_lowest[-1])
    chance = _chance_disagreement(run, min(found["ess"], lowest))
    disagree = not found["rhat"] ** 2 - 1 <= 0.3 + chance
    # Of small components, score and evidence come from draws.
    asks_draws = run.fixed.layout.partition.has_small_components
    if disagree and (not asks_draws or failure(run)):
        said.append(
            f"The islands disagree (r-hat {short(found['rhat'])}): the particles have not "
            "mixed, or the posterior has several modes. Do not trust the log-evidence; "
            f"take more particles, another parametrisation, or {_other_reference(run)}."
        )
    if run.unsettled is not None and run.unsettled.share > _UNSETTLED:
        said.append(_describe_unsettled(run, *run.unsettled))
    return said


def _describe_unsettled(run: Run, coordinate: int, share: float) -> str:
    """Say that the particles move too slowly."""
    name = run.fixed.layout.label(coordinate)
    return (
        f"The particles move slowly: after {run.count(REST)} moves at the estimate {share:.0%} "
        f"is left of how {name} differed from its mean at first, so what annealing missed "
        "may still be missing. Do not trust the log-evidence; try another parametrisation, "
        "or a larger annealing_effort."
    )


def _convergence_warnings(run: Run, found: dict[str, float]) -> list[str]:
    """Return a sentence if the params have not arrived."""
    left = _what_is_left(run, found["shortfall"])
    if not left:
        return []
    if run.given_up is not None:
        left = (
            f"after {run.count(EM_STEP)} steps, the most that num_steps=None takes to come "
            f"within tol={run.given_up:g}, {left}"
        )
    advice = "Take more steps" if num_ascents(run) else "If they are to move, take steps"
    return [f"The parameters have not converged: {left}. {advice}."]


def _what_is_left(run: Run, nats: float) -> str:
    """Say what the params still lack, if it is too much."""
    rise, tol = last_rise(run), run.given_up
    rose = "whether the log-evidence still rises is not known"
    if rise is not None:
        rose = (
            f"over the last {rise.num_steps} steps the log-evidence still rose by "
            f"{rise.nats:.3g} nats"
        )
    if rise is not None and rise.is_large:
        return rose
    if nats > (_SHORT if tol is None else min(tol, _SHORT)):
        return f"the estimate is believed to be {nats:.2g} nats short of the maximum"
    if np.isnan(nats) and run.informs and run.count(EM_STEP):
        return "how far they are from the maximum is not known, the score not being finite"
    return rose if tol is not None and np.isnan(nats) else ""


def _chance_disagreement(run: Run, ess: float) -> float:
    """Return how far the means of islands may differ by chance, in posterior variances.

    The largest of many latents differs by more than one of them.
    """
    settings = run.fixed.settings
    freedom = max(settings.num_islands - 1, 1)
    quantile = 2 * gammainccinv(freedom / 2, _CHANCE / run.fixed.layout.dim)
    return float(quantile / freedom / (max(ess, 1e-3) * settings.num_particles))


def _other_reference(run: Run) -> str:
    """Name a reference that the run did not have."""
    return "reference='laplace'" if run.data.from_prior else "reference='prior'"


def _no_bridge(run: Run) -> str:
    """Say that no Gaussian met the particles, and what to do."""
    again = (
        "run again from these params (init_params) with num_steps=0"
        if num_ascents(run)
        else "another parametrisation"
    )
    return (
        "The log-evidence could not be estimated afresh, since no Gaussian fitted to some "
        "of the particles meets the others, and the number found along the path has no "
        f"known error. Take more particles, or {again}."
    )


def _evidence_warnings(run: Run, found: dict[str, float]) -> list[str]:
    """Return a sentence for each reason to doubt the log-evidence."""
    said = []
    settings, num_components = run.fixed.settings, run.fixed.layout.partition.num_components
    value, error = raw_evidence(run)
    if settings.num_islands > 1 and np.isnan(error):
        return [_no_bridge(run)]
    if error > _LARGE_ERROR * num_components**0.5:
        effort = f", or annealing_effort above {settings.annealing_effort:g}"
        said.append(
            f"The log-evidence has standard error {short(error)} and is not to be trusted. "
            f"Take more particles{'' if is_bridged(run.result) else effort}."
        )
    elif is_bridged(run.result) and found["overlap"] < LEAST_OVERLAP:
        said.append(
            f"Gaussians cover little of the posterior (overlap {found['overlap']:.3f}), so "
            f"the log-evidence and its standard error are not to be trusted{_nor(run)}."
        )
    if num_components == 1 and settings.num_islands > 1:
        said += _disagreement(run, found, value, error)
    return said


def _nor(run: Run) -> str:
    """Name what else the importance draws of several components tell."""
    has_params = run.result.params.size and not run.fixed.layout.partition.is_joint
    return ", nor are the params, which go by it" if has_params else ""


def _weight_warnings(run: Run, found: dict[str, float]) -> list[str]:
    """Return a sentence if importance weights are poor, or differ from the bridge."""
    if run.heavy_tail is not None:
        component, shape = run.heavy_tail
        first = int(np.flatnonzero(run.fixed.layout.partition.owner == component)[0])
        return [
            f"The importance weights of the component of {run.fixed.layout.label(first)} "
            f"have a heavy tail (Pareto k {shape:.2f}), so its part of the log-evidence is "
            f"not to be trusted{_nor(run)}. Look at its data, or take components='joint'."
        ]
    pair = run.result.compared
    if pair is None or (pair.agrees and not found["pareto_k"] >= _NO_MEAN):
        return []
    is_drawn = run.result.bridge.log_evidence == pair.drawn.log_evidence
    if pair.agrees:
        if not is_drawn:
            return []  # the other one is reported
        return [
            f"The importance weights have a heavy tail (Pareto k {found['pareto_k']:.2f}), so "
            "the log-evidence and its standard error are not to be trusted. Take more "
            "particles, or another parametrisation."
        ]
    both = (
        f"A bridge from the particles gives the log-evidence "
        f"{short(found['bridge_log_evidence'])}, and importance sampling "
        f"{short(found['importance_log_evidence'])}: "
    )
    if not is_drawn:
        return [both + "something is missing in one of them. Take more particles."]
    tail = (
        " The params were estimated on such particles: run again from them (init_params)."
    )
    return [
        both
        + "the particles were in modes in the wrong proportion. The second is reported, "
        "and the posterior is drawn anew by it." + (tail if num_ascents(run) else "")
    ]


def _disagreement(
    run: Run, found: dict[str, float], value: float, error: float
) -> list[str]:
    """Return a sentence if the path and the bridge say different things."""
    spread, num_islands = found["recursive_log_evidence_sd"], run.fixed.settings.num_islands
    # Parameters that ascend on the particles bias what is found along the path, each step
    # a little, and where the islands scatter, the logarithm of their mean is low by half
    # the variance.
    # What annealing was too quick for is made up for at rest.
    ascents = num_ascents(run)
    rested = run.unsettled is not None and run.unsettled.share < FORGOTTEN
    slack = 5.0 + 0.01 * ascents if ascents or rested else 1.5
    slack += spread**2 / 2
    both = np.hypot(spread / num_islands**0.5, error)
    if not abs(found["recursive_log_evidence"] - value) > slack + 2 * both:
        return []
    return [
        f"The log-evidence along the path, {short(found['recursive_log_evidence'])}, and "
        f"the one estimated afresh, {short(value)}, disagree beyond their errors. Take more "
        f"particles, or {_other_reference(run)}."
    ]


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
    return [
        f"The data hardly determine {_listed(open_)}, or too few "
        "particles hide it. It may be at the edge of its support. It has no standard "
        "error, and those of the others are as if it were known."
    ]


def _rough_errors(run: Run) -> list[str]:
    """Return a sentence about standard errors that are themselves noise."""
    known, layout = run.result.uncertainty, run.fixed.layout
    if known is None or not (known.error > _ROUGH).any():
        return []
    shares = layout.unravel_params(jnp.asarray(known.error, layout.init_params.dtype))
    rough = [
        f"{label} (\N{PLUS-MINUS SIGN} {float(share[index]):.0%})"
        for name, tree in shares.items()
        for share in jax.tree.leaves(tree)
        for label, index in label_entries(name, share)
        if share[index] > _ROUGH
    ]
    return [
        f"The standard error of {_listed(rough)} is known roughly, since the particles are "
        "too few. Do not trust intervals that rest on it; take more particles, or profile()."
    ]


def _listed(names: list[str]) -> str:
    """Name the first few."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
