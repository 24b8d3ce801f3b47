"""Print what a run found."""

from __future__ import annotations

import itertools

import numpy as np

from numpyro_jala.engine import em
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference.record import Run
from numpyro_jala.results.comparison import aic, bic
from numpyro_jala.results.convergence import last_rise
from numpyro_jala.results.diagnostics import diagnostics, num_observations, warning_messages
from numpyro_jala.results.estimates import estimates, label_entries
from numpyro_jala.results.log_evidence import failure, short

_MOST_ROWS = 20
#: Of a site with more entries than that: so many with the lowest and the highest means.
_MOST_EXTREME = 3


def _param_lines(run: Run, prob: float) -> list[str]:
    result, layout = run.result, run.fixed.layout
    found = estimates(layout, result.params, result.uncertainty, prob)
    if not found:
        return []
    heads = ["estimate", "se", f"{(1 - prob) / 2:.1%}", f"{(1 + prob) / 2:.1%}"]
    lines = [f"{'param':>20} " + " ".join(f"{head:>10}" for head in heads)]
    entries = [
        (label, [float(column[index]) for column in each])
        for name, each in found.items()
        for label, index in label_entries(name, each.value)
    ]
    for label, cells in entries[:_MOST_ROWS]:
        lines.append(f"{label:>20} " + " ".join(_cell(cell) for cell in cells))
    return [*lines, *_rest(len(entries)), ""]


def _rest(num_entries: int) -> list[str]:
    hidden = num_entries - _MOST_ROWS
    return [f"{'...':>20} and {hidden} more"] if hidden > 0 else []


def _cell(value: float) -> str:
    """Print a number, or a dash where there is none to know."""
    return f"{value:10.4f}" if np.isfinite(value) else f"{'-':>10}"


def weighted_quantile(values: np.ndarray, weight: np.ndarray, prob: float) -> float:
    """Return the smallest value with at least ``prob`` of the weight at or below it."""
    order = np.argsort(values)
    total = np.cumsum(weight[order])
    index = np.searchsorted(total, prob * total[-1])
    return float(values[order][min(index, len(values) - 1)])


def effective_size(values: np.ndarray, weight: np.ndarray) -> float:
    """Return how many independent draws would know the mean as well.

    By the spread of the islands' means, and not more than the weights allow.

    Parameters
    ----------
    values, weight
        (num_islands, num_particles), the weights summing to one in all.
    """
    most = 1 / np.sum(weight**2)
    share = weight.sum(1)
    share, values, weight = (part[share > 0] for part in (share, values, weight))
    if len(share) == 1:
        return float(most)
    means = np.sum(weight * values, 1) / share
    mean = np.sum(weight * values)
    variance = np.sum(weight * (values - mean) ** 2)
    noise = means.var(ddof=1) / len(means)
    # What does not vary is known whatever the draws.
    is_constant = variance <= (np.finfo(values.dtype).eps * mean) ** 2
    if is_constant or most * noise <= variance:
        return float(most)
    return float(variance / noise)


def _latent_lines(
    samples: dict[str, np.ndarray], weight: np.ndarray, prob: float, num_islands: int
) -> list[str]:
    low, high = (1 - prob) / 2, (1 + prob) / 2
    heads = ["mean", "sd", f"{low:.1%}", f"{high:.1%}", "ess"]
    lines = [f"{'latent':>20} " + " ".join(f"{head:>10}" for head in heads)]

    def line(label: str, values: np.ndarray) -> str:
        mean = weight @ values
        sd = np.sqrt(weight @ (values - mean) ** 2)
        ends = [weighted_quantile(values, weight, p) for p in (low, high)]
        cells = " ".join(f"{cell:10.4f}" for cell in (mean, sd, *ends))
        islands = (part.reshape(num_islands, -1) for part in (values, weight))
        return f"{label:>20} {cells} {effective_size(*islands):10.0f}"

    shown = (
        (label, value[(slice(None), *index)])
        for name, value in samples.items()
        for label, index in label_entries(name, value[0])
    )
    first = list(itertools.islice(shown, _MOST_ROWS))
    lines += [line(*entry) for entry in first]
    labels = {label for label, _ in first}
    for name, value in samples.items():
        if value[0].size > _MOST_ROWS:
            ends = _extremes(name, value, weight)
            lines += [line(*entry) for entry in ends if entry[0] not in labels]
    return [*lines, *_rest(sum(value[0].size for value in samples.values()))]


def _extremes(
    name: str, value: np.ndarray, weight: np.ndarray
) -> list[tuple[str, np.ndarray]]:
    """Return the entries of a site with the lowest and the highest means."""
    flat = value.reshape(len(value), -1)
    order = np.argsort(weight @ flat, kind="stable")
    places = [*order[:_MOST_EXTREME], *order[-_MOST_EXTREME:]]
    found = []
    for place in places:
        index = np.unravel_index(place, value.shape[1:])
        label = f"{name}[{','.join(map(str, index))}]"
        found.append((label, flat[:, place]))
    return found


def summary(
    run: Run, samples: dict[str, np.ndarray], log_weight: np.ndarray, prob: float
) -> str:
    """Return a table of the estimate, one of the latents, and a line on the evidence."""
    found = diagnostics(run)
    weight = np.exp(log_weight)
    state = run.last_state
    steps = int(state.num_steps) if state is not None else 0
    evidence = f"log-evidence {found['log_evidence']:.3f} ± {found['log_evidence_se']:.3f}"
    if failure(run):
        evidence = "log-evidence unknown, the run has failed"
    last = (
        f"{evidence}   steps {steps}   ESS {found['ess']:.2f}   "
        f"r-hat {short(found['rhat'])}"
    )
    num_islands, num_params = run.fixed.settings.num_islands, run.result.params.size
    more = []
    if num_params:
        criteria = {
            "AIC": aic(found["log_evidence"], num_params),
            "BIC": bic(found["log_evidence"], num_params, num_observations(run)),
        }
        known = {name: value for name, value in criteria.items() if np.isfinite(value)}
        words = [f"{name} {value:.2f}" for name, value in known.items()]
        if np.isfinite(found["shortfall"]):
            words.append(f"estimated shortfall {found['shortfall']:.2g} nats")
        else:
            words.append(f"no standard errors: more than {em.FEW_PARAMS} params")
        rise = last_rise(run)
        if rise is not None:
            words.append(f"rise over the last {rise.num_steps} steps {rise.nats:.2g} nats")
        more = ["   ".join(words)]
    warned = [f"! {text}" for text in warning_messages(run)]
    latents = _latent_lines(samples, weight, prob, num_islands)
    return "\n".join(["", *_param_lines(run, prob), *latents, "", last, *more, *warned])


def plain(
    run: Run,
    samples: dict[str, np.ndarray],
    log_weight: np.ndarray,
    prob: float,
    name: str,
) -> str:
    """Return the tables of a run whose particles have no weights."""
    latents = _latent_lines(samples, np.exp(log_weight), prob, 1)
    last = f"steps {run.count(EM_STEP)}   {name} gives neither standard errors nor evidence"
    return "\n".join(["", *_param_lines(run, prob), *latents, "", last])
