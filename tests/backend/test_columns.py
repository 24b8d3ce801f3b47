"""Columns are looked at in parts, on all cores, and put together again."""

import numpy as np
import pytest

from numpyro_jala.backend import columns


@pytest.mark.parametrize("num_columns", [0, 1, 7, 8, 29])
def test_parts_make_up_the_whole_in_order(monkeypatch, num_columns):
    monkeypatch.setattr(columns, "_COLUMNS", 4)
    values = np.random.default_rng(0).exponential(size=(3, 5, num_columns))
    seen = []

    def function(part):
        seen.append(part.shape[-1])
        return np.stack([part.sum((0, 1)), part[0, 1]])

    found = columns.over_columns(function, values)
    assert np.array_equal(found, np.stack([values.sum((0, 1)), values[0, 1]]))
    assert sum(seen) == num_columns
    assert max(seen) < 8


def test_a_fault_in_one_part_is_not_lost(monkeypatch):
    monkeypatch.setattr(columns, "_COLUMNS", 2)

    def function(part):
        if (part > 5).any():
            raise ValueError("five")
        return part

    with pytest.raises(ValueError, match="five"):
        columns.over_columns(function, np.arange(8.0)[None])
