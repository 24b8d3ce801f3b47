"""Models, data and options at random: 504 cases."""

import pytest

from tests.fuzz import CASES_PER_MODEL, fuzz

MODELS, SEEDS = 3, range(7)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_model_runs_to_finite_answers_or_is_refused(seed):
    counts = fuzz(MODELS, seed, stop=True)
    assert counts["ran"] + counts["refused"] == MODELS * CASES_PER_MODEL
    assert counts["ran"] > 0
