"""Models, data and options at random: 504 cases."""

import pytest

from tests.fuzz import CASES_PER_MODEL, fuzz

MODELS, PARTS = 3, 7


@pytest.mark.parametrize("part", range(PARTS))
def test_every_model_runs_to_finite_answers_or_is_refused(part):
    counts = fuzz(MODELS, part, stop=True)
    assert counts["ran"] + counts["refused"] == MODELS * CASES_PER_MODEL
    assert counts["ran"] > 0
