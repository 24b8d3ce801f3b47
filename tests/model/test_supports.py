"""Params on their supports."""

import numpy as np
import pytest
from numpyro.distributions import constraints

from numpyro_jala.model.supports import find_fallen

SUPPORTS = {
    "mean": constraints.real,
    "sds": constraints.positive,
    "s": constraints.positive,
}
FIRST = {"mean": 2.0, "sds": np.array([1.0, 4.0]), "s": 1e-6}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"mean": 1e-9, "sds": np.array([0.5, 0.005]), "s": 1e-8}, None),
        ({"mean": 2.0, "sds": np.array([3.0, 0.003]), "s": 1e-6}, ("sds", 0.003)),
        ({"mean": 2.0, "sds": np.array([0.0009, 4.0]), "s": 1e-11}, ("s", 1e-11)),
    ],
)
def test_the_scale_that_fell_the_furthest_from_where_it_began_is_found(last, expected):
    found = find_fallen(FIRST, last, SUPPORTS)
    if expected is None:
        assert found is None
    else:
        assert found[0] == expected[0]
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
