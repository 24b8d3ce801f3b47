"""The pages speak of files, functions and tests that exist."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name, least", [("contributing", 25), ("theory", 12)])
def test_what_a_page_names_exists(name, least):
    page = (ROOT / "docs" / f"{name}.md").read_text()
    paths = re.findall(r"`(\.?\w+/[\w./]*)`", page)
    assert len(paths) > least
    assert [path for path in paths if not file_named(path).exists()] == []
    named = re.findall(r"`(?:\w+\.)?(\w+)`\s+in\s+`(\w+/[\w/]*\.py)`", page)
    assert len(named) > least // 4
    missing = [
        (name, path)
        for name, path in named
        if not re.search(
            rf"^ *(?:def|class) {name}\b|^{name}\b.*=", file_named(path).read_text(), re.M
        )
    ]
    assert missing == []


#: Private words that the field's terms have replaced: see the table in the changelog.
OLD_WORDS = (
    "slowness",
    "cautions?",
    "promises?",
    "trembl",
    "heaps?",
    "rivals?",
    "CLIMB",
    "ASCEND",
    "without a word",
)


def test_no_old_word_is_left():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    sources = [*(ROOT / "numpyro_jala").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    spoken = re.compile(rf"\b(?:{'|'.join(OLD_WORDS)})\b")
    found = [
        (path.name, match.group())
        for path in (*pages, *sources)
        if path.name != "changelog.md" and "_build" not in path.parts
        for match in spoken.finditer(path.read_text())
    ]
    assert found == []
