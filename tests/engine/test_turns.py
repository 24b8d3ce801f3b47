"""Who moves when: the target, the particles, or both."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_jala.engine import adaptation, turns
from numpyro_jala.engine.state import ANNEAL, ANNEAL_FIXED, EM_STEP, REST, Settings

BASE = {name: None for name in Settings._fields if name != "takes_turns"}
BASE |= {"annealing_effort": 4.0}
STEP_SIZE = jnp.array([0.5, 0.001])


@pytest.mark.parametrize(
    ("stage", "takes_turns", "expected"),
    [
        (REST, False, [1, 0, 1, 0, 1, 0]),
        (EM_STEP, True, [1, 0, 1, 0, 1, 0]),
        (EM_STEP, False, [1, 1, 1, 1, 1, 1]),
        (ANNEAL, True, [1, 0, 0, 1, 0, 0]),
        (ANNEAL_FIXED, False, [1, 0, 0, 1, 0, 0]),
    ],
)
def test_the_target_moves_in_its_turn(stage, takes_turns, expected):
    settings = Settings(**BASE, takes_turns=takes_turns)
    found = turns._moves_target(settings, jnp.arange(6), jnp.asarray(stage))
    np.testing.assert_array_equal(found, expected)


def multiplier(takes_turns, ascending, fixed_target, step_size=None):
    settings = Settings(**{**BASE, "step_size": step_size}, takes_turns=takes_turns)
    flags = jnp.asarray(ascending), jnp.asarray(fixed_target)
    return turns.step_multiplier(settings, STEP_SIZE, *flags)


def test_particles_stand_while_the_target_moves_unless_both_do():
    tested = adaptation.tested_multiplier(STEP_SIZE)
    assert (tested != 1).all()
    for takes_turns in (True, False):
        # A target that stands is that of a Metropolis test.
        np.testing.assert_array_equal(multiplier(takes_turns, False, True), tested)
        np.testing.assert_array_equal(multiplier(takes_turns, True, True), tested)
        np.testing.assert_array_equal(multiplier(takes_turns, True, True, 0.1), 1.0)
        np.testing.assert_array_equal(multiplier(takes_turns, False, False), 0.0)
    np.testing.assert_array_equal(multiplier(True, True, False), 0.0)
    np.testing.assert_array_equal(multiplier(False, True, False), 1.0)
