"""The shape of the package: who imports whom, how long functions are, what is documented."""

import ast
import re
import statistics
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import numpyro_jala

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "numpyro_jala"
SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_text())
    for path in sorted(PACKAGE.rglob("*.py"))
}

#: From the ground up: a room imports itself and those below. On top stand single files.
ROOMS = (
    ("_typing", "datasets"),
    ("backend",),
    ("engine",),
    ("model",),
    ("inference",),
    ("results",),
    ("fitter", "plots"),
    ("jalaem", "baselines"),
    ("__init__",),
)
#: Who may know each neighbour.
NEIGHBOURS = {
    "arviz": "results.inference_data",
    "matplotlib": "plots",
    "numpyro": "inference.reference model.density model.enumeration model.inspection "
    "model.marginal "
    "model.parametrisation model.sites model.supports model.validation "
    "results.diagnostics results.fitted",
    "optax": "baselines.algorithms engine.em inference.reference",
    "scipy": "inference.importance model.dependence.graph results.comparison "
    "results.diagnostics results.profile",
    "tqdm": "inference.loop",
}


def modules_imported(tree):
    """Return the modules that a file imports, by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)


def files_imported(tree):
    """Return the package's own files among them."""
    parts = (name.split(".") for name in modules_imported(tree))
    own = {".".join(part[1:]) for part in parts if part[0] == "numpyro_jala"}
    return {name if name in SOURCES else name.rpartition(".")[0] for name in own} - {""}


def room_of(name):
    """Return the folder of a file, or the file itself where it stands in none."""
    return name.split(".")[0]


def arrows_up(imports):
    """Return the imports of a room that is not below, from files to what they import."""
    level = {room: i for i, rooms in enumerate(ROOMS) for room in rooms}
    return [
        (name, other)
        for name, others in imports.items()
        for other in others
        if room_of(other) != room_of(name) and level[room_of(other)] >= level[room_of(name)]
    ]


IMPORTS = {name: files_imported(tree) for name, tree in SOURCES.items()}


def test_imports_never_go_round():
    assert len(list(TopologicalSorter(IMPORTS).static_order())) >= len(SOURCES)


def test_imports_point_down_between_rooms():
    assert {room_of(name) for name in SOURCES} == {
        room for level in ROOMS for room in level
    }
    assert arrows_up(IMPORTS) == []


@pytest.mark.parametrize(
    "planted", [("engine.smc", "model.density"), ("backend.blocks", "inference.loop")]
)
def test_a_planted_import_upwards_is_seen(planted):
    name, other = planted
    assert arrows_up({**IMPORTS, name: {*IMPORTS[name], other}}) == [planted]


def test_every_room_says_what_comes_in_and_goes_out():
    for room in PACKAGE.iterdir():
        if (room / "__init__.py").exists():
            text = ast.get_docstring(SOURCES[f"{room.name}.__init__"])
            assert " in" in text and "out" in text, room


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


def source_lines(name):
    return PACKAGE.joinpath(*name.split(".")).with_suffix(".py").read_text().splitlines()


def num_parameters(function):
    given = function.args
    own = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in own if name not in ("self", "cls")])


#: Of what users call, which may have many options.
WIDE = {"jalaem.__init__", "jalaem.init", "jalaem.run", "algorithms.run"}


FUNCTIONS = [
    (f"{name.rpartition('.')[2]}.{node.name}", node, source_lines(name))
    for name, tree in SOURCES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
]


def test_functions_are_short():
    lengths = [code_lines(node, lines) for _, node, lines in FUNCTIONS]
    assert statistics.median(lengths) <= 12
    assert statistics.quantiles(lengths, n=10)[-1] <= 40


def test_no_function_has_many_parameters():
    held = [(name, node) for name, node, _ in FUNCTIONS if name not in WIDE]
    assert [name for name, node in held if num_parameters(node) > 8] == []


def test_every_public_name_is_on_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", page, re.M))
    assert named == set(numpyro_jala.__all__)
    assert ".. automodule:: numpyro_jala.plots" in page
    assert ".. automodule:: numpyro_jala.datasets" in page


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
