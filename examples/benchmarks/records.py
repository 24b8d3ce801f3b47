"""Records of a benchmark: printing them, and summing them up over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

Record = dict[str, Any]


def steps_or_auto(text: str) -> int | None:
    """Read a number of steps, or "auto" for as many as it takes."""
    return None if text == "auto" else int(text)


def emit(record: Record) -> None:
    """Print a record, with null where a number is not finite."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        return None if isinstance(value, float) and not np.isfinite(value) else value

    known = {key: plain(value) for key, value in record.items()}
    print(json.dumps(known, allow_nan=False), flush=True)


def finite(records: list[Record], key: str) -> np.ndarray:
    """Collect a field of the records, without what is not finite."""
    values = np.array([record[key] for record in records], np.float64)
    return values[np.isfinite(values)]


def spread(values: np.ndarray) -> float:
    """Compute the standard deviation, or nan if there are too few values."""
    return float(values.std(ddof=1)) if values.size > 1 else float("nan")


def centre(values: np.ndarray, statistic: Callable[..., Any] = np.mean) -> float:
    """Compute the mean or another statistic, or nan if there are no values."""
    return float(statistic(values)) if values.size else float("nan")


def summarise_errors(records: list[Record]) -> Record:
    """Compute bias, spread and calibration of the log-evidence."""
    errors = finite(records, "error")
    return {
        "num_seeds": len(records),
        "num_not_finite": len(records) - errors.size,
        "bias": centre(errors),
        "sd": spread(errors),
        "worst": centre(np.abs(errors), np.max),
        "median_se": centre(finite(records, "se"), np.median),
        "sd_of_z": spread(finite(records, "z")),
    }


def summarise_cost(records: list[Record]) -> Record:
    """Compute what the runs cost, the first call apart from the rest."""
    warm = finite(records[1:], "seconds")
    return {
        "mean_evaluations": centre(finite(records, "num_evaluations")),
        "first_s": records[0]["seconds"],
        "median_warm_s": centre(warm, np.median),
        "worst_warm_s": centre(warm, np.max),
        "num_warned": sum(bool(record["warnings"]) for record in records),
    }


def summarise_ratios(records: list[Record]) -> Record:
    """Compute the mean of Z_hat / Z, which is 1 if the estimate is unbiased."""
    summary: Record = {}
    for key in ("error", "recursive_error"):
        logs = np.array([record[key] for record in records], np.float64)
        with np.errstate(over="ignore"):
            ratios = np.exp(logs[~np.isnan(logs)])  # -inf counts, as an estimate of 0
        name = key.replace("error", "ratio")
        summary[f"mean_{name}"] = centre(ratios)
        summary[f"mean_{name}_se"] = spread(ratios) / np.sqrt(max(ratios.size, 1))
    return summary


def summarise_components(ratios: np.ndarray) -> Record:
    """Compute how far the mean of each column, Z_hat / Z of a component, is from one."""
    error = ratios.std(0, ddof=1) / np.sqrt(len(ratios))
    z = (ratios.mean(0) - 1) / error
    overall = ratios.mean(1)
    return {
        "num_seeds": len(ratios),
        "num_components": z.size,
        "worst_z": np.abs(z).max(),
        "sd_z": spread(z),
        "worst_standard_error": error.max(),
        "mean_ratio": overall.mean(),
        "mean_ratio_se": spread(overall) / np.sqrt(len(overall)),
    }


def summarise_shortfalls(records: list[Record]) -> Record:
    """Compute how far below the maximum the params ended."""
    shortfalls = finite(records, "shortfall")
    return {
        "median_shortfall": centre(shortfalls, np.median),
        "worst_shortfall": centre(shortfalls, np.max),
        "median_reported_shortfall": centre(
            finite(records, "reported_shortfall"), np.median
        ),
    }
