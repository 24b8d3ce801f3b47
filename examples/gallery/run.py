"""Fit models of the gallery by default settings, and compare with known answers.

Each model is run as a new user would: ``JALAEM(model)``, its defaults, and no params but
those of the model. A line is a run; the first of a model compiles. Run
``python examples/gallery/run.py --help``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jax import random

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]
from entry import Entry  # noqa: E402
from records import emit  # noqa: E402

from numpyro_jala import JALAEM  # noqa: E402

FAMILIES = (
    "baseball",
    "mixtures",
    "capture",
    "annotation",
    "markov",
    "series",
    "regression",
    "hierarchies",
    "processes",
    "imputation",
    "neural",
    "others",
)
ANSWERS = HERE / "answers.json"


def load() -> dict[str, Entry]:
    """Collect the entries of all families."""
    entries: dict[str, Entry] = {}
    for family in FAMILIES:
        found = import_module(family).ENTRIES
        assert not set(found) & set(entries), family
        entries |= found
    return entries


@cache
def constant_answer(name: str) -> float:
    """Return the exact log-evidence of a model without params, computed once."""
    exact = load()[name].exact
    assert exact is not None
    return exact({})


def answer(name: str, entry: Entry, params: dict[str, Any]) -> tuple[float, float]:
    """Return the log-evidence from elsewhere and its standard error, or NaN."""
    if entry.exact is not None:
        return (entry.exact(params) if params else constant_answer(name)), 0.0
    stored = json.loads(ANSWERS.read_text()) if ANSWERS.exists() else {}
    found = stored.get(name)
    return (found["log_evidence"], found["se"]) if found else (np.nan, 0.0)


def sizes(jala: JALAEM) -> dict[str, int]:
    """Count the latents, their components and the params."""
    params = jala.params.values()
    return {
        "latents": int(np.sum(jala.components["sizes"])),
        "components": int(jala.components["num_components"]),
        "params": sum(int(np.size(value)) for value in params),
    }


def fit(jala: JALAEM, name: str, entry: Entry, seed: int) -> tuple[dict[str, Any], Any]:
    """Fit once; return a record and the result."""
    record: dict[str, Any] = {"model": name, "seed": seed, "first": seed == 0}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            idata = jala.run(
                random.key(seed), entry.num_steps, *entry.args, progress_bar=False
            )
        except Exception as error:  # what a user would see goes into the table
            seconds = round(time.perf_counter() - start, 1)
            said = f"{type(error).__name__}: {error}"
            return record | {"seconds": seconds, "error": said, "warnings": []}, None
    seconds = round(time.perf_counter() - start, 1)
    exact, se = answer(name, entry, jala.params)
    error = jala.log_evidence - exact
    said = [str(each.message) for each in caught if each.category is UserWarning]
    return record | sizes(jala) | {
        "seconds": seconds,
        "log_evidence": float(jala.log_evidence),
        "se": float(jala.log_evidence_se),
        "answer": exact,
        "answer_se": se,
        "z": float(error / np.hypot(jala.log_evidence_se, se)),
        "warnings": sorted(set(said)),
    }, idata


def main(names: list[str], num_seeds: int, pictures: Path | None) -> None:
    """Fit each model with each seed."""
    entries = load()
    for name in names or entries:
        entry = entries[name]
        jala = JALAEM(entry.model)
        for seed in range(num_seeds):
            record, idata = fit(jala, name, entry, seed)
            emit(record)
            if idata is None and seed == 0:
                break  # refused: it would be with any key
            if seed == 0 and pictures is not None and entry.shown is not None:
                from picture import draw  # needs matplotlib, and nothing else does

                draw(idata["posterior"][entry.shown], pictures / f"{name}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=load(), action="append")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--pictures", type=Path, help="a folder to draw posteriors into")
    options = parser.parse_args()
    main(options.model, options.seeds, options.pictures)
