"""Particles are replaced by draws."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.inference import estimation
from numpyro_jala.inference.estimation import Weighted
from numpyro_jala.inference.programs import Fixed
from tests.tools import assert_mean

NUM_ISLANDS, NUM_DRAWS, NUM_PARTICLES = 200, 50, 10


def redraw(parts):
    """Replace particles by draws of two latents that are equal, weighed for a mean of 0.7."""

    class Layout:
        partition = parts

    class Settings:
        mesh = None

    draws = random.normal(random.key(3), (NUM_ISLANDS, NUM_DRAWS))
    position = jnp.stack([draws, draws], -1)
    by_component = jnp.stack([draws] * parts.num_components, 1)
    drawn = Weighted(position, by_component**2, 0.7 * by_component)
    blank = jnp.ones((NUM_ISLANDS, parts.num_components, NUM_PARTICLES))
    rows = jnp.ones((NUM_ISLANDS, NUM_PARTICLES, 2))
    cloud = Cloud(rows, rows, blank, blank, rows, blank, blank[..., None], blank[..., 0])
    return estimation.redraw(Fixed(Layout, Settings), random.key(4), drawn, cloud)


@pytest.mark.parametrize("parts", [joint(2), partition(np.arange(2))])
def test_draws_are_resampled_by_their_weights(parts):
    new = redraw(parts)
    position = np.asarray(new.position)
    assert_mean(position.mean((1, 2)), 0.7, 0.15)
    last = position[..., [0]] if parts.is_joint else position
    np.testing.assert_allclose(new.potential, np.swapaxes(last, 1, 2) ** 2, rtol=1e-6)
    assert not new.log_weight.any()
    assert (new.gradient == 1).all()


def test_components_are_resampled_apart():
    together = np.asarray(redraw(joint(2)).position)
    np.testing.assert_array_equal(together[..., 0], together[..., 1])
    apart = np.asarray(redraw(partition(np.arange(2))).position)
    centred = apart - apart.mean(1, keepdims=True)
    assert_mean((centred[..., 0] * centred[..., 1]).mean(1), 0.0, 0.15)
