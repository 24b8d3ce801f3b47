"""The examples in docstrings run, and give what they show."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "numpyro_jala"
SHOWN = sorted(
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if ">>> " in path.read_text()
)


def test_what_users_call_has_examples():
    assert {"results.comparison", "engine.em", "jalaem", "baselines.algorithms"} <= set(
        SHOWN
    )


@pytest.mark.parametrize("name", SHOWN)
def test_examples(name):
    found = doctest.testmod(importlib.import_module(f"numpyro_jala.{name}"))
    assert found.attempted > 0 and found.failed == 0
