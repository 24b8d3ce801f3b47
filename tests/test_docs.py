"""The pages speak of files, functions and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_that_the_table_of_models_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "models.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in source} == set()


def file_named(path):
    """Return a file that a page names, inside of the package or of the repository."""
    inside = ROOT / "numpyro_jala" / path
    return inside if inside.exists() else ROOT / path


def test_what_the_contributing_guide_names_exists():
    page = (ROOT / "docs" / "contributing.md").read_text()
    paths = re.findall(r"`(\.?\w+/[\w./]*)`", page)
    assert len(paths) > 25
    assert [path for path in paths if not file_named(path).exists()] == []
    named = re.findall(r"`(\w+)`\s+in\s+`(\w+/[\w/]*\.py)`", page)
    assert len(named) > 12
    missing = [
        (name, path)
        for name, path in named
        if not re.search(
            rf"^(?:def|class) {name}\b|^{name}\b.*=", file_named(path).read_text(), re.M
        )
    ]
    assert missing == []
