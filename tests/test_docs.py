"""The pages speak of tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_that_the_table_of_models_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "models.md").read_text()))
    source = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in source} == set()
