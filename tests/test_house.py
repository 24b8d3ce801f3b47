"""The shape of the package: who imports whom, how long functions are, what is documented."""

import ast
import re
import statistics
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import numpyro_jala

ROOT = Path(__file__).parents[1]
SOURCES = {
    path.stem: ast.parse(path.read_text())
    for path in sorted((ROOT / "numpyro_jala").glob("*.py"))
}

#: From the ground up: a file imports its own floor and those below.
FLOORS = {
    "ground": "_typing versions compilation blocks weights precision sharding langevin "
    "resampling",
    "engine": "adaptation geometry transport tempering em smc state planning path",
    "model": "call sites supports model enumeration inspection checks options",
    "answers": "reference evidence flow information estimates",
    "loops": "unweighted stages record checkpoint diagnosis driver",
    "faces": "summary convert comparison plots results fitter inference rivals __init__",
}
#: Who may know each neighbour.
NEIGHBOURS = {
    "arviz": "convert",
    "matplotlib": "plots",
    "numpyro": "checks diagnosis enumeration inspection model reference results sites supports",
    "optax": "em reference rivals",
    "scipy": "comparison",
    "tqdm": "driver",
}


def modules_imported(tree):
    """Return the modules that a file imports, by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{each.name}" for each in node.names]
            yield from whole if node.module == "numpyro_jala" else [node.module]


def files_imported(tree):
    """Return the package's own files among them."""
    parts = (name.split(".") for name in modules_imported(tree))
    return {part[1] for part in parts if part[0] == "numpyro_jala" and len(part) > 1}


def test_imports_never_go_round():
    graph = {name: files_imported(tree) for name, tree in SOURCES.items()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(SOURCES)


def test_imports_point_down():
    floor = {
        name: level for level, names in enumerate(FLOORS.values()) for name in names.split()
    }
    assert set(floor) == set(SOURCES)
    up = [
        (name, other)
        for name, tree in SOURCES.items()
        for other in files_imported(tree)
        if floor[other] > floor[name]
    ]
    assert up == []


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_few_files_know_a_neighbour(neighbour):
    knowing = {
        name
        for name, tree in SOURCES.items()
        if neighbour in {module.split(".")[0] for module in modules_imported(tree)}
    }
    assert knowing == set(NEIGHBOURS[neighbour].split())


def code_lines(function, lines):
    """Count the lines of a function that are neither docstring, comment nor empty."""
    first = function.body[0]
    text = range(0)
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        text = range(first.lineno, first.end_lineno + 1)
    kept = (
        lines[number - 1].strip()
        for number in range(function.lineno, function.end_lineno + 1)
        if number not in text
    )
    return sum(bool(line) and not line.startswith("#") for line in kept)


def test_functions_are_short():
    lengths = [
        code_lines(node, (ROOT / "numpyro_jala" / f"{name}.py").read_text().splitlines())
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    assert statistics.median(lengths) <= 12
    assert statistics.quantiles(lengths, n=10)[-1] <= 40


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", page, re.M))
    assert named == set(numpyro_jala.__all__)
    assert ".. automodule:: numpyro_jala.plots" in page


def test_every_public_name_has_a_docstring():
    public = [
        (name, node)
        for name, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node in tree.body
    ]
    assert [(name, node.name) for name, node in public if not ast.get_docstring(node)] == []
