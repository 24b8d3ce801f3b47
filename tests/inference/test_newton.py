"""The maximum by scores on common draws: of a sum over very many components."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_jala.inference import newton
from numpyro_jala.inference.estimation import Score

#: Where the log-likelihood is highest, and how sharply.
BEST, CURVATURE = np.array([0.7, -0.2]), np.array([[4.0, 1.0], [1.0, 2.0]])


def climb(size, reach, again=False):
    """Climb a quadratic, shared by components that are large beside it, from zero."""
    calls, offset = [], np.random.default_rng(0).normal(0.0, 3.0, size)

    def score_at(params):
        calls.append(params)
        away = np.asarray(params, float) - BEST
        each = offset - 0.5 * away @ CURVATURE @ away / size
        ess = np.exp(-reach * np.sum(np.square(params)))
        islands = np.stack([CURVATURE @ away] * 3)
        each, rounding = each.astype(np.float32), 1e-7 * np.linalg.norm(offset)
        return Score(each, islands, np.asarray(ess), rounding)

    covariance = np.linalg.inv(CURVATURE)
    found = newton.maximise(score_at, jnp.zeros(2), covariance, again)
    return found, calls


@pytest.mark.parametrize("size", [1, 1_000_000])
def test_one_newton_step_is_enough_whatever_the_sum_rounds_to(size):
    found, calls = climb(size, 0.0)
    np.testing.assert_allclose(found.params, BEST, rtol=1e-5)
    assert len(calls) == 2
    assert found.as_new


def test_draws_that_lose_some_of_their_size_are_to_be_made_anew():
    found, _ = climb(1, 1.0)
    np.testing.assert_allclose(found.params, BEST, rtol=1e-5)
    assert not found.as_new


def test_a_loss_beyond_rounding_is_seen():
    rng = np.random.default_rng(1)
    here = rng.normal(0.0, 3.0, 100_000).astype(np.float32)
    rounded = here + rng.choice([-1.0, 1.0], here.size) * np.spacing(here)
    lower = here - np.float32(1e-5)  # one nat in all
    other = np.zeros((3, 2)), np.ones(()), 1e-7 * np.linalg.norm(here)
    scores = [Score(each, *other) for each in (here, rounded, lower)]
    assert newton._rises(scores[0], scores[1])
    assert not newton._rises(scores[0], scores[2])
