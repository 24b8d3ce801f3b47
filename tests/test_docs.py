"""The pages speak of files, functions and tests that exist."""

import os
import re
import runpy
import urllib.error
import urllib.request
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from numpyro import handlers

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


def cells(page):
    """Return the code of a page, cell by cell."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"```\{code-cell\} python\n(.*?)```", text, re.S)


def slopes_of_the_likelihood(model, data):
    """Return the derivative of the log-likelihood by each latent, at a draw of them."""

    def draw():
        sites = handlers.trace(handlers.seed(model, 0)).get_trace(*data).values()
        unseen = [site for site in sites if not site.get("is_observed", False)]
        kinds = ("sample", "param")
        return [
            {site["name"]: site["value"] for site in unseen if site["type"] == kind}
            for kind in kinds
        ]

    def log_likelihood(latents, params):
        held = handlers.substitute(model, {**params, **latents})
        sites = handlers.trace(handlers.seed(held, 0)).get_trace(*data).values()
        seen = [site for site in sites if site.get("is_observed", False)]
        return sum(site["fn"].log_prob(site["value"]).sum() for site in seen)

    return jax.jit(lambda: jax.grad(log_likelihood)(*draw()))()


def test_every_effect_of_the_models_from_formulas_touches_the_data():
    names = {}
    exec("\n".join(cells("formulas.md")), names)
    assert len(names["models"]) == 6
    for model, data in names["models"].items():
        for slope in slopes_of_the_likelihood(model, data).values():
            assert jnp.isfinite(slope).all() and (slope != 0).all(), model.__name__


def test_names_of_other_projects_are_links_only_with_a_network(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the file changes

    def configured(urlopen):
        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return runpy.run_path(str(ROOT / "docs" / "conf.py"))["intersphinx_mapping"]

    def unreachable(*_, **__):
        raise urllib.error.URLError("no network")

    assert configured(unreachable) == {}
    assert {"arviz", "jax", "numpyro"} < set(configured(lambda *_, **__: nullcontext()))


def test_no_page_needs_files_of_the_repository():
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    code = {
        str(page): "\n".join(cells(page)) for page in pages if "_build" not in page.parts
    }
    assert sum(bool(text) for text in code.values()) > 8
    outside = re.compile(r"examples|Path\.cwd|\.parents?\b|\.csv|\.\./")
    assert [page for page, text in code.items() if outside.search(text)] == []
