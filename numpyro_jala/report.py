"""What a run found, whether to trust it, and how to print it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala import evidence, information
from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.estimates import estimates, label_entries
from numpyro_jala.information import Information, Uncertainty
from numpyro_jala.model import Trace
from numpyro_jala.stages import Data, Fixed
from numpyro_jala.state import ASCEND, CLIMB, REST, Info, State
from numpyro_jala.weights import effective_fraction, log_mean_exp, normalise

_MOST_ROWS = 20


class Result(NamedTuple):
    """The estimate, the last cloud at it, and the evidence."""

    params: Array  # (num_params,), unconstrained
    position: Array  # (num_islands, num_particles, dim)
    log_weight: Array  # (num_islands, num_particles), summing to one in all
    potential: Array  # (num_islands, num_particles)
    bridge: evidence.Bridge
    recursive: Array  # (num_islands,), log-evidence along the path
    information: Information | None
    uncertainty: Uncertainty | None  # None without parameters, and with very many
    rng_key: PRNGKey


class Run:
    """A run in progress: what it is about, and what has happened so far."""

    def __init__(
        self,
        fixed: Fixed,
        data: Data,
        trace: Trace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_evaluations: int,
    ) -> None:
        self.fixed = fixed
        self.data = data
        self.trace = trace
        self.args = args
        self.kwargs = kwargs
        num_particles = fixed.settings.num_islands * fixed.settings.num_particles
        self.num_evaluations = num_evaluations + num_particles
        self.num_new = 0
        self.last_state: State | None = None
        self.finished: Result | None = None
        self.heaps: dict[str, float] = {}
        self._infos: dict[int, list[Info]] = {}

    def keep(self, stage: int, infos: Info, count: int) -> None:
        """Keep the first ``count`` rows of what a chunk of steps reported."""
        self.num_new = count
        settings = self.fixed.settings
        self.num_evaluations += count * settings.num_islands * settings.num_particles
        rows = jax.tree.map(lambda leaf: leaf[:count], infos)
        self._infos.setdefault(stage, []).append(rows)

    def infos(self, stage: int) -> Info | None:
        """Return all rows of a stage, or None if it took no steps."""
        parts = self._infos.get(stage, [])
        if not sum(len(part.promise) for part in parts):
            return None
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    @property
    def result(self) -> Result:
        """The result of a run that has ended."""
        assert self.finished is not None
        return self.finished

    def watch(self, stage: int) -> dict[str, str]:
        """Return the numbers that one wants to see while it runs."""
        last = self._infos[stage][-1]
        if not len(last.promise):
            return {}
        shown = {"log_evidence": f"{float(log_mean_exp(last.log_evidence[-1])):.2f}"}
        if stage == CLIMB:
            shown = {"temperature": f"{last.temperature[-1].min():.2g}", **shown}
        return {**shown, "ess": f"{last.ess[-1].mean():.2f}"}

    def finish(
        self,
        state: State,
        params: Array,
        bridge: evidence.Bridge,
        recursive: Array,
        known: Information | None,
    ) -> None:
        """Keep the result."""
        is_free = np.asarray(self.fixed.layout.is_free)
        weight = normalise(state.cloud.log_weight)
        alive = jnp.maximum(jnp.sum(weight.sum(-1) > 0), 1)
        self.finished = Result(
            params,
            state.cloud.position,
            jnp.log(weight / alive),
            state.cloud.potential,
            bridge,
            recursive,
            known,
            None if known is None else information.invert(known, is_free),
            state.rng_key,
        )


class Sampler(NamedTuple):
    """What ArviZ's converter asks of a sampler: a model to replay."""

    model: Any


def _shortfall(result: Result) -> float:
    """Return the nats to the maximum: none without parameters, unknown with many."""
    if result.uncertainty is not None:
        return result.uncertainty.shortfall
    return float("nan") if result.params.size else 0.0


def best_evidence(run: Run) -> tuple[float, float]:
    """Return the log-evidence and its standard error.

    One island alone has no other to bridge to: there it is the recursive estimate, and
    the error is that of a mean of independent weights.
    """
    result = run.result
    if run.fixed.settings.num_islands > 1:
        return float(result.bridge.log_evidence), float(result.bridge.standard_error)
    fraction = float(effective_fraction(result.log_weight)[0])
    size = run.fixed.settings.num_particles
    return float(result.recursive[0]), float(np.sqrt((1 / fraction - 1) / size))


def potential_scale_reduction(weight: np.ndarray, values: np.ndarray) -> float:
    """Return the largest r-hat of the columns, islands taken as chains.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    values
        (num_islands, num_particles, columns)
    """
    mean = np.einsum("jn,jnd->jd", weight, values)
    within = np.einsum("jn,jnd->jd", weight, (values - mean[:, None]) ** 2).mean(0)
    between = mean.var(0, ddof=1) if len(mean) > 1 else np.zeros_like(within)
    return float(np.sqrt(1 + np.max(between / np.maximum(within, 1e-30))))


def diagnostics(run: Run) -> dict[str, float]:
    """Return numbers that tell whether to trust the result."""
    result = run.result
    log_evidence, error = best_evidence(run)
    seen = [run.infos(s) for s in (CLIMB, ASCEND, REST)]
    rows = [info for info in seen if info is not None]
    at_end = rows[-1].ess if rows else np.ones((1, 1))
    weight = np.asarray(normalise(result.log_weight))
    recursive = np.asarray(result.recursive, float)
    recursive = recursive[np.isfinite(recursive)]  # an island may have died
    return {
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "recursive_log_evidence": float(log_mean_exp(result.recursive)),
        "recursive_log_evidence_sd": float(recursive.std(ddof=1))
        if recursive.size > 1
        else 0.0,
        "overlap": float(result.bridge.overlap),
        "shortfall": _shortfall(result),
        "rhat": potential_scale_reduction(weight, np.asarray(result.position)),
        "ess": float(np.median(at_end)),
        "min_ess": float(min((info.ess.min() for info in rows), default=1.0)),
        "dead_particles": float(sum(info.died.sum() for info in rows)),
        "num_evaluations": float(run.num_evaluations),
    }


def doubts(run: Run) -> list[str]:
    """Return a sentence for each thing that a user should doubt."""
    found = diagnostics(run)
    said = [
        f"Of the draws of {name!r} from its prior {share:.0%} are rounded to the edge of "
        f"its support. The mass there is lost, and the log-evidence is not to be trusted. "
        "Turn on double precision (jax_enable_x64), or use another prior."
        for name, share in run.heaps.items()
    ]
    if found["ess"] < 0.1:
        said.append(
            f"The effective sample size collapsed: its median at the end is "
            f"{found['ess']:.2f} of an island. Take more particles or a smaller step_size."
        )
    # With few effective draws the means of islands differ by chance alone.
    chance = 4 / (max(found["ess"], 1e-3) * run.fixed.settings.num_particles)
    if found["rhat"] ** 2 - 1 > 0.3 + chance:
        said.append(
            f"The islands disagree (r-hat {found['rhat']:.2f}): the particles have not "
            "mixed, or the posterior has several modes. Do not trust the log-evidence; "
            "take more particles, another parametrisation, or another reference."
        )
    if found["log_evidence_se"] > 0.5 or not np.isfinite(found["log_evidence"]):
        said.append(
            f"The log-evidence has standard error {found['log_evidence_se']:.2f} and is "
            "not to be trusted. Take more particles."
        )
    elif found["overlap"] < 0.05:
        said.append(
            f"Gaussians cover little of the posterior (overlap {found['overlap']:.3f}), so "
            "the log-evidence and its standard error are not to be trusted."
        )
    gap = abs(found["recursive_log_evidence"] - found["log_evidence"])
    islands = run.fixed.settings.num_islands
    error = np.hypot(
        found["recursive_log_evidence_sd"] / islands**0.5, found["log_evidence_se"]
    )
    if islands > 1 and gap > 1.5 + 2 * error:
        said.append(
            f"The log-evidence along the path, {found['recursive_log_evidence']:.2f}, and "
            f"the one estimated afresh, {found['log_evidence']:.2f}, disagree beyond their "
            "errors. Take more particles, or another reference."
        )
    said += _open_params(run)
    if found["shortfall"] > 0.1:
        said.append(
            f"The parameters have not converged: the estimate is believed to be "
            f"{found['shortfall']:.2g} nats short of the maximum. Take more steps."
        )
    return said


def _open_params(run: Run) -> list[str]:
    """Return a sentence for each parameter of which the data say nothing."""
    result, layout = run.result, run.fixed.layout
    # One island alone cannot tell what the data do not say from noise.
    alone = run.fixed.settings.num_islands == 1
    if alone or result.uncertainty is None or result.uncertainty.known.all():
        return []
    found = estimates(layout, result.params, result.uncertainty, 0.9)
    return [
        f"The data hardly determine {label}, estimated as {float(each.value[index]):.3g}, or "
        "too few particles hide it. It may be at the edge of its support. It has no "
        "standard error, and those of the others are as if it were known."
        for name, each in found.items()
        for label, index in label_entries(name, each.value)
        if not np.isfinite(each.standard_error[index])
    ]


def _param_lines(run: Run, prob: float) -> list[str]:
    result, layout = run.result, run.fixed.layout
    found = estimates(layout, result.params, result.uncertainty, prob)
    if not found:
        return []
    heads = ["estimate", "se", f"{(1 - prob) / 2:.1%}", f"{(1 + prob) / 2:.1%}"]
    lines = [f"{'param':>20} " + " ".join(f"{head:>10}" for head in heads)]
    for name, each in found.items():
        for label, index in label_entries(name, each.value)[:_MOST_ROWS]:
            cells = (float(column[index]) for column in each)
            lines.append(f"{label:>20} " + " ".join(_cell(cell) for cell in cells))
    return [*lines, ""]


def _cell(value: float) -> str:
    """Print a number, or a dash where there is none to know."""
    return f"{value:10.4f}" if np.isfinite(value) else f"{'-':>10}"


def weighted_quantile(values: np.ndarray, weight: np.ndarray, prob: float) -> float:
    """Return the smallest value with at least ``prob`` of the weight at or below it."""
    order = np.argsort(values)
    total = np.cumsum(weight[order])
    index = np.searchsorted(total, prob * total[-1])
    return float(values[order][min(index, len(values) - 1)])


def _latent_lines(
    samples: dict[str, np.ndarray], weight: np.ndarray, prob: float
) -> list[str]:
    low, high = (1 - prob) / 2, (1 + prob) / 2
    heads = ["mean", "sd", f"{low:.1%}", f"{high:.1%}"]
    lines = [f"{'latent':>20} " + " ".join(f"{head:>10}" for head in heads)]
    entries = [
        (label, value[(slice(None), *index)])
        for name, value in samples.items()
        for label, index in label_entries(name, value[0])
    ]
    for label, values in entries[:_MOST_ROWS]:
        mean = weight @ values
        sd = np.sqrt(weight @ (values - mean) ** 2)
        ends = [weighted_quantile(values, weight, p) for p in (low, high)]
        cells = " ".join(f"{cell:10.4f}" for cell in (mean, sd, *ends))
        lines.append(f"{label:>20} {cells}")
    if len(entries) > _MOST_ROWS:
        lines.append(f"{'...':>20} and {len(entries) - _MOST_ROWS} more")
    return lines


def summary(
    run: Run, samples: dict[str, np.ndarray], log_weight: np.ndarray, prob: float
) -> str:
    """Return a table of the estimate, one of the latents, and a line on the evidence."""
    found = diagnostics(run)
    weight = np.exp(log_weight)
    state = run.last_state
    steps = int(state.num_steps) if state is not None else 0
    last = (
        f"log-evidence {found['log_evidence']:.3f} ± {found['log_evidence_se']:.3f}   "
        f"steps {steps}   ESS {found['ess']:.2f}   r-hat {found['rhat']:.2f}"
    )
    if run.fixed.layout.init_params.size:
        last += f"   estimated shortfall {found['shortfall']:.2g} nats"
    warned = [f"! {text}" for text in doubts(run)]
    tables = [*_param_lines(run, prob), *_latent_lines(samples, weight, prob)]
    return "\n".join(["", *tables, "", last, *warned])
