"""Write the tables of the gallery's page from the stored records.

``python examples/gallery/listing.py`` reads ``examples/gallery/records.jsonl``, which holds
what ``run.py`` printed, and puts tables between the marks of ``docs/gallery.md``.
``listing.py FILE ...`` first takes the models of these files into the records, in place of
what is stored of them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from entry import Entry
from run import ANSWERS, HERE, load

sys.path.append(str(HERE.parent / "paper"))
from common import table  # noqa: E402
from page import DOCS, fill  # noqa: E402

RECORDS = HERE / "records.jsonl"
PAGE, PICTURES = DOCS / "gallery.md", DOCS / "gallery"
NOTHING = "—"
Record = dict[str, Any]


def read(*paths: Path) -> dict[str, list[Record]]:
    """Read the records of files, by model."""
    found: dict[str, list[Record]] = {}
    for path in paths:
        for record in map(json.loads, path.read_text().splitlines()):
            found.setdefault(record["model"], []).append(record)
    return found


def answered(record: Record, answer: Record | None) -> Record:
    """Put an answer of NUTS that was found after the run beside what the run found."""
    if answer is None or record.get("log_evidence") is None:
        return record
    error = record["log_evidence"] - answer["log_evidence"]
    z = error / float(np.hypot(record["se"], answer["se"]))
    return record | {"answer": answer["log_evidence"], "answer_se": answer["se"], "z": z}


def keep(paths: list[Path]) -> None:
    """Take the models of files into the records, in the order of the gallery."""
    stored = read(RECORDS) if RECORDS.exists() else {}
    stored |= read(*paths)
    answers = json.loads(ANSWERS.read_text())
    lines = [
        json.dumps(answered(record, answers.get(name)))
        for name in load()
        for record in stored.get(name, [])
    ]
    RECORDS.write_text("\n".join(lines) + "\n")


def number(value: Any, digits: int = 2) -> str:
    """Write a number, or a dash where there is none."""
    return NOTHING if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def digits_of(error: float | None) -> int:
    """Return how many digits of a value make sense with this standard error."""
    if error is None or not error > 0:
        return 3
    return int(np.clip(1 - np.floor(np.log10(error)), 1, 4))


def with_error(value: Any, error: Any) -> str:
    """Write a value with its standard error."""
    digits = digits_of(error)
    text = number(value, digits)
    return f"{text} ± {number(error, digits)}" if text != NOTHING and error else text


def name_and_picture(name: str, entry: Entry) -> str:
    """Write a model's name, what it is after, and its picture."""
    is_drawn = (PICTURES / f"{name}.png").exists()
    picture = f"<br>![{name}](gallery/{name}.png)" if is_drawn else ""
    return f"`{name}`<br>[{entry.title}]({entry.after}){picture}"


def worst(runs: list[Record]) -> str:
    """Write the largest |z|; it is bold if one beyond three came without a warning."""
    z = {abs(record["z"]): record for record in runs if record.get("z") is not None}
    if not z:
        return NOTHING
    is_silent = any(value > 3 and not record["warnings"] for value, record in z.items())
    return f"**{number(max(z))}**" if is_silent else number(max(z))


def row(name: str, entry: Entry, runs: list[Record]) -> list[str]:
    """Sum up the runs of a model."""
    first, *rest = runs
    warm = [record["seconds"] for record in rest]
    warned = sum(bool(record["warnings"]) for record in runs)
    failed = sum("error" in record for record in runs)
    seconds = f"{first['seconds']:.0f}" + (f" / {np.median(warm):.1f}" if warm else "")
    components = first["components"]
    latents = f"{first['latents']}" + (f" in {components}" if components > 1 else "")
    return [
        name_and_picture(name, entry),
        latents,
        str(first["params"]),
        seconds,
        with_error(first["log_evidence"], first["se"]),
        with_error(first["answer"], first["answer_se"]),
        entry.by if first["answer"] is not None else NOTHING,
        worst(runs),
        f"{warned} of {len(runs)}" + (f", {failed} failed" if failed else ""),
    ]


HEADS = [
    "model",
    "latents",
    "params",
    "seconds, first / later",
    "log-evidence",
    "answer",
    "answer by",
    "worst \\|z\\|",
    "warned",
]


def fitted(entries: dict[str, Entry], records: dict[str, list[Record]]) -> str:
    """Make the table of the models that were fitted."""
    rows = [
        row(name, entry, records[name])
        for name, entry in entries.items()
        if name in records and "error" not in records[name][0]
    ]
    return table(HEADS, rows)


def refused(entries: dict[str, Entry], records: dict[str, list[Record]]) -> str:
    """Make the table of the models that were refused, with what was said."""
    rows = [
        [
            name_and_picture(name, entry),
            number(records[name][0]["seconds"], 1),
            plain(records[name][0]["error"]),
        ]
        for name, entry in entries.items()
        if name in records and "error" in records[name][0]
    ]
    return table(["model", "seconds", "what it says"], rows)


def plain(text: str) -> str:
    """Put a sentence into a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def error_of(record: Record, first: Record) -> list[str]:
    """Return the error of a run of a model that was not refused at once."""
    return [record["error"]] if "error" in record and "error" not in first else []


def said(entries: dict[str, Entry], records: dict[str, list[Record]]) -> str:
    """List the warnings of each model, with how many runs had them."""
    lines = []
    for name in entries:
        runs = records.get(name, [])
        kinds: dict[str, list[str]] = {}
        for record in runs:
            for text in [*record["warnings"], *error_of(record, runs[0])]:
                kinds.setdefault(re.sub(r"[\d.]+", "#", text)[:40], []).append(text)
        for texts in kinds.values():
            lines.append(f"- `{name}`, {len(texts)} of {len(runs)}: *{plain(texts[0])}*")
    return "\n".join(lines) + "\n"


def missing(entries: dict[str, Entry], records: dict[str, list[Record]]) -> str:
    """List the models without records."""
    names = [f"`{name}`" for name in entries if name not in records]
    return (", ".join(names) + ".\n") if names else "None.\n"


TABLES: dict[str, Callable[..., str]] = {
    "fitted": fitted,
    "refused": refused,
    "said": said,
    "missing": missing,
}


def tables(name: str) -> str:
    """Make a part of the page, by the name of its mark."""
    return TABLES[name](load(), read(RECORDS))


if __name__ == "__main__":
    keep([Path(name) for name in sys.argv[1:]])
    PAGE.write_text(fill(PAGE.read_text(), tables))
