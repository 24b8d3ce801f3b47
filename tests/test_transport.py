"""What particles do when their target moves."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala import smc, transport


def one_sided(rng_key, edge):
    """Draws of N(0, 1) above an edge, in islands, with the score of their mean."""
    draws = random.truncated_normal(rng_key, edge, 9.0, (8, 64))
    zero = jnp.zeros((8, 64))
    return smc.Cloud(
        position=draws[..., None],
        log_weight=zero,
        potential=draws**2 / 2,
        gradient=draws[..., None],
        slope=zero,
        scores=-draws[..., None],
        log_evidence=jnp.zeros(8),
    )


@pytest.mark.parametrize("dense", [True, False])
def test_the_score_is_right_also_where_the_density_jumps(dense):
    weight = jnp.full((8, 64), 1 / 64)
    factor = jnp.ones((8, 1, 1) if dense else (8, 1))
    for edge in (-9.0, 0.3):
        cloud = one_sided(random.key(1), edge)
        last = jnp.zeros((8, 1, 2))
        found = transport.learn(weight, cloud, cloud.rates, factor, last, jnp.zeros(()))
        plain = cloud.scores.mean()
        if edge < -8:  # smooth: the score is exact, and plain draws are noisy
            assert abs(found.rate[..., 1].mean()) < 0.5 * abs(plain)
        else:
            np.testing.assert_allclose(found.rate[..., 1].mean(), plain, rtol=1e-5)
            assert (found.shift == 0).all()


def test_a_mean_is_zero_up_to_its_noise():
    weight = jnp.full((4, 100), 0.01)
    noise = random.normal(random.key(0), (4, 100))
    noise = (noise - noise.mean()) / noise.std()
    for shift, expected in ((0.2, True), (0.3, False)):  # the standard error is 1/20
        columns = jnp.stack([noise + shift, noise], -1)
        found = transport.is_centred(weight, columns)
        assert found.tolist() == [expected, True]
