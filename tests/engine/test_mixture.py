"""Mixtures of the other islands' clusters, on targets with several modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

from numpyro_jala.engine import mixture
from numpyro_jala.engine.partition import joint, partition
from tests.tools import assert_mean

NUM_ISLANDS, NUM_PARTICLES, DIM = 3, 60, 3
SHIFT = jnp.array([4.0, -1.0, 0.0])
fit = jax.jit(mixture.fit, static_argnums=2)
loo_log_density = jax.jit(mixture.loo_log_density)
loo_draw = jax.jit(mixture.loo_draw, static_argnums=2)


def two_modes(key, num_islands=NUM_ISLANDS, num_particles=NUM_PARTICLES):
    """A narrow mode with three tenths of the mass, and a wide one."""
    side_key, noise_key = random.split(key)
    shape = num_islands, num_particles
    narrow = random.bernoulli(side_key, 0.3, (*shape, 1))
    noise = random.normal(noise_key, (*shape, DIM))
    return jnp.where(narrow, SHIFT + 0.3 * noise, -SHIFT + 0.8 * noise)


def log_target(x):
    narrow = stats.norm(np.asarray(SHIFT), 0.3).logpdf(x).sum(-1) + np.log(0.3)
    wide = stats.norm(-np.asarray(SHIFT), 0.8).logpdf(x).sum(-1) + np.log(0.7)
    return np.logaddexp(narrow, wide)


@pytest.fixture
def fitted():
    position = two_modes(random.key(0))
    weight = jnp.full(position.shape[:2], 1 / NUM_PARTICLES)
    return fit(weight, position, 4), position


def by_hand(found, island, x):
    """The mixture of the other islands' clusters, by SciPy."""
    log_density = []
    for j, k in np.ndindex(found.log_share.shape):
        if j != island:
            factor = np.asarray(found.factor[j, k], float)
            one = stats.multivariate_t(np.asarray(found.mean[j, k]), factor @ factor.T, 4)
            log_density.append(float(found.log_share[j, k]) + one.logpdf(x))
    own = np.delete(np.exp(found.log_share), island, 0) if island < len(found.mean) else 1
    return np.logaddexp.reduce(log_density) - np.log(np.sum(own))


def test_an_island_proposes_from_the_clusters_of_the_others(fitted):
    found, position = fitted
    log_density = loo_log_density(found, position)
    for island in range(NUM_ISLANDS):
        expected = by_hand(found, island, position[island])
        np.testing.assert_allclose(log_density[island], expected, rtol=1e-4, atol=1e-4)


def test_nothing_is_learned_from_the_particles_that_move(fitted):
    _, position = fitted
    weight = jnp.full(position.shape[:2], 1 / NUM_PARTICLES)
    changed = fit(weight, position.at[1].multiply(7.0), 4)
    found, _ = fitted
    rows = position[1:2].repeat(NUM_ISLANDS, 0)
    before, after = (loo_log_density(m, rows) for m in (found, changed))
    np.testing.assert_array_equal(before[1], after[1])
    assert not np.allclose(before[0], after[0])
    key = random.key(1)
    drawn = [loo_draw(key, m, (NUM_ISLANDS, 20)) for m in (found, changed)]
    np.testing.assert_array_equal(drawn[0][1], drawn[1][1])


def test_draws_are_from_the_density_and_cover_both_modes(fitted):
    found, _ = fitted
    draws = loo_draw(random.key(2), found, (NUM_ISLANDS, 6_000))
    ratio = np.exp(log_target(draws) - np.asarray(loo_log_density(found, draws)))
    assert_mean(ratio, 1.0, 0.05)
    narrow = np.asarray(draws[..., 0]) > 2.0
    assert_mean(ratio * narrow, 0.3, 0.05)
    assert (ratio.mean() ** 2 / (ratio**2).mean()) > 0.5


def test_clusters_find_the_modes_and_their_shapes():
    position = two_modes(random.key(3), 4, 2_000)
    found = fit(jnp.full(position.shape[:2], 1 / 2_000), position, 4)
    share = np.exp(found.log_share)
    narrow = np.asarray(found.mean[..., 0]) > 0
    np.testing.assert_allclose((share * narrow).sum(1), 0.3, atol=0.05)
    np.testing.assert_allclose(share.sum(1), 1.0, rtol=1e-5)
    scale = np.sqrt(np.sum(np.asarray(found.factor) ** 2, -1))
    assert np.all(scale[narrow] < 0.5)


def test_a_dead_island_and_copies_of_a_particle_do_no_harm():
    position = two_modes(random.key(4)).at[2].set(0.5)
    weight = jnp.full(position.shape[:2], 1 / NUM_PARTICLES).at[0].set(0.0)
    found = fit(weight, position, 4)
    draws = loo_draw(random.key(5), found, (NUM_ISLANDS, 50))
    assert np.isfinite(draws).all()
    assert np.isfinite(loo_log_density(found, draws)).all()
    np.testing.assert_allclose(draws[1], 0.5, atol=1e-3)


def test_common_clusters_have_their_share_in_every_proposal(fitted):
    found, _ = fitted
    factor = jnp.broadcast_to(0.1 * jnp.eye(DIM), (4, DIM, DIM))
    both = mixture.with_common(found, jnp.full((4, DIM), 50.0), factor, 0.1)
    draws = loo_draw(random.key(6), both, (NUM_ISLANDS, 4_000))
    for far in np.asarray(draws[..., 0]) > 25:
        assert_mean(far, 0.1, 0.03)
    log_density = loo_log_density(both, draws[:, :50])
    for island in range(NUM_ISLANDS):
        rows = draws[island, :50]
        common = stats.multivariate_t(np.full(DIM, 50.0), 0.01 * np.eye(DIM), 4)
        expected = np.logaddexp(
            np.log(0.9) + by_hand(found, island, rows), np.log(0.1) + common.logpdf(rows)
        )
        np.testing.assert_allclose(log_density[island], expected, rtol=1e-3, atol=1e-3)


def test_mixtures_serve_one_small_component():
    assert mixture.serves(joint(1)) and mixture.serves(joint(mixture.MOST_LATENTS))
    assert not mixture.serves(joint(mixture.MOST_LATENTS + 1))
    assert not mixture.serves(joint(0)) and not mixture.serves(partition(np.arange(3)))
