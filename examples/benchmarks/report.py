"""Run the benchmarks, keep their records, and write the tables of the documentation.

``python examples/benchmarks/report.py`` runs all parts, hours of them, and keeps what each
prints in ``docs/benchmarks/<part>.jsonl``; ``report.py speed cold`` runs these alone, and
``report.py --tables`` none. Each time the tables of ``docs/benchmarks.md`` are made anew.
The part ``evidence`` needs other packages, which ``peers.py`` names, and the part ``gpu`` a
GPU: it runs when it is asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bars import EVIDENCE_PROBLEMS
from estimation import ENOUGH
from records import Record

sys.path.insert(0, str(Path(__file__).parents[1] / "paper"))
from common import table  # noqa: E402
from page import DOCS, fill  # noqa: E402

from numpyro_jala.backend.versions import version_of  # noqa: E402

FOLDER, PAGE = DOCS / "benchmarks", DOCS / "benchmarks.md"
HERE = Path(__file__).parent
#: What each part runs, a process after the other. What many programs are compiled for
#: does not fit into one: the system limits the memory maps of a process.
PARTS = {
    "speed": [
        ["speed.py", "logistic", "evaluation"],
        ["speed.py", "network", "--repeats", "2"],
    ],
    "gpu": [
        ["speed.py", "wide network", "network", "--repeats", "3"],
        ["speed.py", "wide network", "--steps", "2000", "--repeats", "3"],
        ["speed.py", "evaluation", "--particles", "1000000", "--repeats", "3"],
        ["scaling.py", "particles", "latents", "--largest", "6"],
    ],
    "cold": [["cold.py"]],
    "cold_eight_cores": [["cold.py"]],
    "scaling": [["scaling.py"]],
    "estimation": [["estimation.py", "--seeds", "6"]],
    "evidence": [
        ["evidence.py", "--seeds", "6", "--problems", name] for name in EVIDENCE_PROBLEMS
    ],
}
#: What is for other machines, and runs only if it is named.
ELSEWHERE = ("gpu", "cold_eight_cores")
#: Root mean square error of the evidence that is asked for, in nats.
WANTED = defaultdict(lambda: 0.05, glmm=0.1)
NOTHING = "—"


def run(part: str) -> None:
    """Run a part in processes of its own, and keep its records line by line."""
    packages = ("numpyro_jala", "numpyro", "jax")
    made_by = {name: version_of(name) for name in packages} | {"cores": os.cpu_count()}
    path = FOLDER / f"{part}.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"made_by": made_by}) + "\n")
        file.flush()
        for script, *arguments in PARTS[part]:
            command = [sys.executable, "-W", "ignore", HERE / script, *arguments]
            subprocess.run(command, stdout=file, check=True)


def read(part: str) -> list[Record]:
    """Read the records of a part, without the line that says by what they were made."""
    path = FOLDER / f"{part}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if "made_by" not in record]


def group(records: Iterable[Record], *keys: str) -> dict[tuple[Any, ...], list[Record]]:
    """Put records together that agree in some fields."""
    found: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        values = (record[key] for key in keys)
        found[tuple(tuple(v) if isinstance(v, list) else v for v in values)].append(record)
    return found


def warm(records: list[Record], key: str) -> np.ndarray:
    """Return a field of the runs after the first; nan where it is not finite."""
    values = [record[key] for record in records if not record["is_cold"]]
    return np.array(values, np.float64)


def speed_tables(part: str) -> str:
    """Show a run against a loop by hand, and a step against its evaluation."""
    records = group(read(part), "part")
    runs = [
        [
            record["problem"],
            f"{record['num_particles']:,}",
            record["num_steps"],
            f"{record['by_hand']:.2f}",
            f"{record['run']:.2f}",
            f"{record['ratio']:.2f}",
        ]
        for record in records["fused",]
    ]
    steps = [
        [
            f"{record['num_particles']:,}",
            *(f"{record[f'{name}_ms']:.2f}" for name in ("evaluation", "rest", "ascent")),
            f"{100 * record['share_of_the_rest']:.0f} %",
        ]
        for record in records["evaluation",]
    ]
    run_heads = ["problem", "particles", "steps", "by hand, s", "`run`, s", "ratio"]
    step_heads = ["particles", "evaluation, ms", "step at rest, ms", "EM step, ms"]
    return f"{table(run_heads, runs)}\n{table([*step_heads, 'beside evaluating'], steps)}"


#: Where programs are kept, by the name that ``cold.py`` gives; others are not shown.
KEPT = {"off": "", "filled": ", programs on disk"}


def cold_table(part: str) -> str:
    """Show where the time to a first result goes."""
    seconds = ("import_s", "first_s", "compile_s", "second_s")
    found = [record for record in read(part) if record.get("kept", "off") in KEPT]
    named = [
        {**each, "way": each["method"] + KEPT[each.get("kept", "off")]} for each in found
    ]
    rows = []
    for (way,), records in group(named, "way").items():
        median = {
            key: float(np.median([record[key] for record in records]))
            for key in (*seconds, "second_programs")
        }
        shown = (f"{median[key]:.1f}" for key in seconds)
        rows.append([way, *shown, round(median["second_programs"])])
    heads = ["way", "import, s", "first run, s", "of it compiling, s", "second run, s"]
    return table([*heads, "compiled in the second"], rows)


def scaling_tables(part: str) -> str:
    """Show the cost of a step by particles, by latents and by devices."""
    found = []
    for (size,), records in group(read(part), "part").items():
        key = f"num_{size}"
        if "ns_per_particle" not in records[0]:
            continue
        rows = [
            [
                f"{record[key]:,}",
                f"{record['step_ms']:.2f}",
                f"{record['ns_per_particle']:,.0f}",
                f"{record['memory_mb']:,.1f}",
                f"{record['particles_mb']:,.2f}",
            ]
            for record in records
        ]
        heads = [size, "EM step, ms", "ns a particle", "memory, MB", "particles, MB"]
        found.append(table(heads, rows))
    return "\n".join(found)


def evidence_table() -> str:
    """Show the least warm seconds with which each way is as right as wanted."""
    rows = []
    for (problem,), records in group(read("evidence"), "problem").items():
        for (peer,), theirs in group(records, "peer").items():
            rows.append([problem, peer, *quickest_evidence(problem, theirs)])
    heads = ["problem", "way", "size", "warm, s", "cold, s", "evaluations"]
    return table([*heads, "root mean square error", "worst"], rows)


def quickest_evidence(problem: str, records: list[Record]) -> list[str]:
    """Describe the quickest size that is right, or else the most precise."""
    tried = []
    for (size,), runs in group(records, "size").items():
        errors, seconds = warm(runs, "error"), warm(runs, "seconds")
        if errors.size < 2:
            continue
        rms = float(np.sqrt(np.mean(errors**2)))
        is_right = rms <= WANTED[problem]
        order = (not is_right, np.median(seconds) if is_right else rms)
        evaluations = [run["num_evaluations"] for run in runs]
        count = NOTHING if None in evaluations else f"{np.mean(evaluations):,.0f}"
        text = [
            f"{size:,}",
            f"{np.median(seconds):.2f}" if is_right else NOTHING,
            f"{runs[0]['seconds']:.1f}",
            count,
            f"{rms:.3f}",
            f"{np.abs(errors).max():.3f}",
        ]
        tried.append((order, text))
    return min(tried)[1] if tried else [NOTHING] * 6


def estimation_table() -> str:
    """Show the least warm seconds with which each way gets near the maximum."""
    rows = []
    for (problem,), records in group(read("estimation"), "problem").items():
        for (way,), theirs in group(records, "way").items():
            rows.append([problem, way, *quickest_estimate(theirs)])
    heads = ["problem", "way", "setting", "warm, s", "mean shortfall, nats", "worst"]
    return table(heads, rows)


def quickest_estimate(records: list[Record]) -> list[str]:
    """Describe the quickest setting that comes near enough, or else the nearest."""
    tried = []
    for (setting,), runs in group(records, "setting").items():
        short, seconds = warm(runs, "shortfall"), warm(runs, "seconds")
        if short.size < 2 or not np.isfinite(short).all():
            continue
        is_near = short.mean() <= ENOUGH
        order = (not is_near, np.median(seconds) if is_near else short.mean())
        text = [
            ", ".join(map(str, setting)),
            f"{np.median(seconds):.2f}" if is_near else NOTHING,
            f"{short.mean():.1g}",
            f"{short.max():.1g}",
        ]
        tried.append((order, text))
    return min(tried)[1] if tried else [NOTHING] * 4


TABLES = {
    "speed": partial(speed_tables, "speed"),
    "gpu": partial(speed_tables, "gpu"),
    "cold": partial(cold_table, "cold"),
    "cold_eight_cores": partial(cold_table, "cold_eight_cores"),
    "scaling": partial(scaling_tables, "scaling"),
    "gpu_scaling": partial(scaling_tables, "gpu"),
    "evidence": evidence_table,
    "estimation": estimation_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "parts", nargs="*", default=[p for p in PARTS if p not in ELSEWHERE]
    )
    parser.add_argument("--tables", action="store_true", help="run nothing")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"{sorted(unknown)} are not among {list(PARTS)}")
    FOLDER.mkdir(exist_ok=True)
    for part in options.parts if not options.tables else []:
        run(part)
    PAGE.write_text(fill(PAGE.read_text(), lambda name: TABLES[name]()))


if __name__ == "__main__":
    main()
