"""What particles do when their target moves."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import smc, transport


def one_sided(rng_key, edge):
    """Draws of N(0, 1) above an edge, in islands, with the score of their mean."""
    draws = random.truncated_normal(rng_key, edge, 9.0, (8, 64))
    zero = jnp.zeros((8, 64))
    return smc.Cloud(
        position=draws[..., None],
        momentum=zero[..., None],
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


@pytest.mark.parametrize("dense", [True, False])
def test_islands_at_different_temperatures_agree_on_the_way(dense):
    """In x ~ N(θ, 1), y | x ~ N(x, s²) the posterior's mean moves by 1 / (1 + T / s²)."""
    weight, size = jnp.full((8, 64), 1 / 64), 0.1
    temperature = 1e-2 * jnp.exp(jnp.linspace(-0.1, 0.1, 8))[:, None]
    precision = 1 + temperature / size**2
    mean = temperature / size**2 * 100.0 / precision  # at θ = 0, with y = 100
    noise = random.normal(random.key(2), (8, 64))
    x = 0.95 * mean + noise / jnp.sqrt(precision)  # which lags behind
    rows = jnp.zeros((8, 64))
    cloud = smc.Cloud(
        position=x[..., None],
        momentum=rows[..., None],
        log_weight=rows,
        potential=rows,
        gradient=((x - mean) * precision)[..., None],
        slope=rows,
        scores=-x[..., None],
        log_evidence=jnp.zeros(8),
    )
    factor = jnp.ones((8, 1, 1) if dense else (8, 1))
    last = jnp.zeros((8, 1, 2))
    found = transport.learn(weight, cloud, cloud.rates, factor, last, jnp.zeros(()))
    # Particles shift by minus this. The average over the others' temperatures is right to
    # a tenth, and so are covariances of a few hundred draws.
    np.testing.assert_allclose(-found.learned[:, 0, 1:], 1 / precision, rtol=0.2)
