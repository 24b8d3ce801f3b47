"""Look at a run: its estimates, its evidence, its particles.

Each function takes what ``JALAEM.run`` returned, also read back from a file, and draws on
the given axes or on new ones, which it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr

from numpyro_jala.results.estimates import label_entries
from numpyro_jala.results.groups import find_group
from numpyro_jala.results.profile import Profile

_BAND = 2.0  # standard errors on either side
_MOST_PARAMS = 24
_MOST_NAMED = 80  # groups whose names can still be read


def _check_weighted(idata: Any) -> None:
    """Refuse the result of an algorithm whose particles have no weights."""
    if "log_evidence" not in idata.attrs:
        raise ValueError(
            "The result has neither weights nor a log-evidence, as JALAEM gives them. For "
            "other algorithms there is plot_params."
        )


def _axes(ax: Any) -> Any:
    return plt.subplots(figsize=(6, 3), layout="constrained")[1] if ax is None else ax


def plot_params(
    idata: Any, var_names: Sequence[str] | None = None, axes: Any = None
) -> np.ndarray:
    """Draw the path of each param, with its estimate and interval.

    Parameters
    ----------
    idata
        What ``JALAEM.run`` returned.
    var_names
        Names of params; by default all.
    axes
        One for each entry of the params.
    """
    trace, estimate = find_group(idata, "em_trace"), find_group(idata, "estimate")
    known = [str(name) for name in estimate.data_vars]
    names = known if var_names is None else list(var_names)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"There is no param {unknown[0]!r}; there are {', '.join(known)}.")
    entries = [
        (name, label, index)
        for name in names
        for label, index in label_entries(name, estimate[name].values[0])
    ][:_MOST_PARAMS]
    if axes is None:
        columns = min(3, len(entries))
        rows = -(-len(entries) // columns)
        size = (3.5 * columns, 2.2 * rows)
        _, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        for spare in axes.ravel()[len(entries) :]:
            spare.remove()
    axes = np.ravel(axes)[: len(entries)]
    for ax, (name, label, index) in zip(axes, entries, strict=True):
        path = trace.get(f"{name}_param", trace[name])  # where another field has the name
        ax.plot(trace["step"], path.values[(slice(None), *index)])
        value, _, low, high = (column[index] for column in estimate[name].values)
        ax.axhline(value, color="C1", linestyle="--", zorder=1)
        if np.isfinite([low, high]).all():
            ax.axhspan(low, high, color="C1", alpha=0.2, linewidth=0)
        ax.set_title(label, fontsize="medium")
        ax.set_xlabel("step")
    return axes


def plot_log_evidence(idata: Any, ax: Any = None) -> Any:
    """Draw the log-evidence along the way, and the estimate at the end of it."""
    _check_weighted(idata)
    trace, ax = find_group(idata, "em_trace"), _axes(ax)
    value, error = trace["log_evidence"].values, trace["log_evidence_se"].values
    ax.plot(trace["step"], value, label="along the path")
    reach = _BAND * error
    ax.fill_between(trace["step"], value - reach, value + reach, alpha=0.3, linewidth=0)
    final, error = idata.attrs["log_evidence"], idata.attrs["log_evidence_se"]
    ax.axhline(final, color="C1", label="at the estimate")
    ax.axhspan(final - _BAND * error, final + _BAND * error, color="C1", alpha=0.3)
    # The way up may be long: show where it ends.
    low, high = np.quantile(value, [0.2, 1.0])
    ax.set_ylim(min(low, final) - 1, max(high, final) + 1)
    ax.set(xlabel="step", ylabel="log-evidence")
    ax.legend()
    return ax


def _stages(idata: Any) -> list[tuple[str, xr.Dataset]]:
    found = []
    for name in ("anneal_trace", "em_trace"):
        try:
            found.append((name.removesuffix("_trace"), find_group(idata, name)))
        except ValueError:
            continue
    return found


def plot_ess(idata: Any, ax: Any = None) -> Any:
    """Draw the effective sample size of each step, and which of them were resampled."""
    _check_weighted(idata)
    ax, start = _axes(ax), 0
    for colour, (name, trace) in enumerate(_stages(idata)):
        step, ess = start + trace["step"].values, trace["ess"].values
        ax.plot(step, ess, color=f"C{colour}", label=name)
        resampled = trace["resampled"].values > 0
        ax.plot(step[resampled], ess[resampled], "o", color=f"C{colour}", markersize=3)
        start += step.size
    ax.set(
        xlabel="step (dots: resampled)", ylabel="ESS, share of particles", ylim=(0, 1.05)
    )
    ax.legend()
    return ax


def plot_temperature(idata: Any, ax: Any = None) -> Any:
    """Draw the path from the reference (0) to the posterior (1)."""
    trace, ax = find_group(idata, "anneal_trace"), _axes(ax)
    ax.plot(trace["step"], trace["temperature"])
    ax.set(xlabel="step", ylabel="temperature", ylim=(0, 1.1))
    ax.set_yscale("symlog", linthresh=1e-4)
    return ax


def plot_islands(idata: Any, ax: Any = None) -> Any:
    """Draw what each island says of the log-evidence, beside what they say together."""
    _check_weighted(idata)
    ax = _axes(ax)
    each = find_group(idata, "sample_stats")["log_marginal_likelihood"]
    value, error = idata.attrs["log_evidence"], idata.attrs["log_evidence_se"]
    ax.axvspan(value - _BAND * error, value + _BAND * error, alpha=0.3, color="C1")
    ax.axvline(value, color="C1")
    ax.plot(each.values, each["chain"].values, "o")
    ax.ticklabel_format(useOffset=False)
    ax.set(xlabel="log-evidence", ylabel="island")
    return ax


def plot_comparison(table: pd.DataFrame, ax: Any = None) -> Any:
    """Draw the log-evidences of a table from ``compare``, the best model on top."""
    if ax is None:
        size = (6, 1 + 0.5 * len(table))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    row = np.arange(len(table))
    ax.errorbar(table["log_evidence"], row, xerr=_BAND * table["se"], fmt="o", capsize=3)
    ax.axvline(table["log_evidence"].iloc[0], color="grey", linestyle=":")
    ax.set_yticks(row, table.index)
    ax.margins(y=0.3)
    ax.invert_yaxis()
    ax.set_xlabel("log-evidence")
    return ax


def plot_random_effects(table: pd.DataFrame, ax: Any = None) -> Any:
    """Draw the effects of a table from ``random_effects``: a caterpillar plot.

    Parameters
    ----------
    table
        From ``random_effects``, or ``best_and_worst`` of one.
    ax
        Axes to draw on.
    """
    table = table.sort_values("mean", kind="stable")
    row = np.arange(len(table))
    if ax is None:
        size = (6, min(1.5 + 0.18 * len(table), 12))
        ax = plt.subplots(figsize=size, layout="constrained")[1]
    ax.hlines(row, table["low"], table["high"], color="C0", alpha=0.5)
    ax.plot(table["mean"], row, "o", color="C0", markersize=3)
    ax.axvline(0.0, color="grey", linestyle=":")
    if len(table) <= _MOST_NAMED:
        ax.set_yticks(row, table.index, fontsize="small")
    else:
        ax.set_yticks([])
    ax.set(xlabel="effect", ylabel=table.index.name, ylim=(-1, len(table)))
    return ax


def plot_profile(profile: Profile, ax: Any = None) -> Any:
    """Draw the signed root of a profile likelihood, with the interval that it gives.

    A straight line says that the likelihood is that of a Gaussian, and that the interval
    of the standard error is as good.

    Parameters
    ----------
    profile
        What ``JALAEM.profile`` returned.
    """
    ax = _axes(ax)
    rows, far = profile.values, NormalDist().inv_cdf(0.5 + profile.prob / 2)
    ax.plot(rows["value"], rows["zeta"], marker="o", ms=3)
    ax.axhspan(-far, far, color="0.9", zorder=0)
    ax.axhline(0.0, color="0.6", lw=0.8)
    for end in (profile.low, profile.high):
        if np.isfinite(end):
            ax.axvline(end, color="0.4", ls=":")
    ax.set_xlabel(profile.name)
    ax.set_ylabel("signed root of twice the drop")
    return ax
