import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from scipy.stats import norm

from numpyro_jala.inference import evidence
from numpyro_jala.inference.evidence import Gaussian
from tests.tools import assert_mean

EXACT = 1.7


def test_log_density_is_that_of_a_normal():
    factor = jnp.array([[1.5, 0.0], [0.4, 0.7]])
    gaussian = Gaussian(jnp.array([1.0, -2.0]), factor)
    position = jnp.array([[0.3, 0.1], [2.0, -3.0]])
    expected = jax.scipy.stats.multivariate_normal.logpdf(
        position, gaussian.mean, factor @ factor.T
    )
    np.testing.assert_allclose(
        evidence.log_density(gaussian, position), expected, rtol=1e-5
    )
    diagonal = Gaussian(gaussian.mean, jnp.array([1.5, 0.7]))
    expected = norm([1, -2], [1.5, 0.7]).logpdf(np.asarray(position)).sum(-1)
    np.testing.assert_allclose(
        evidence.log_density(diagonal, position), expected, rtol=1e-5
    )
    noise = random.normal(random.key(0), (100_000, 2))
    draws = evidence.from_noise(gaussian, noise)
    np.testing.assert_allclose(np.cov(draws.T), factor @ factor.T, atol=0.05)


def one_bridge(rng_key):
    """Log-gamma particles, skewed, with evidence exp(EXACT); islands fit each other."""
    particle_key, draw_key = random.split(rng_key)
    shape = jnp.array([3.0, 1.5])
    position = jnp.log(random.gamma(particle_key, shape, (12, 40, 2)))
    weight = jnp.full((12, 40), 1 / 40)

    def log_target(x):
        return EXACT + jnp.sum(shape * x - jnp.exp(x) - jax.lax.lgamma(shape), -1)

    gradient = jnp.exp(position) - shape
    draws, at_particles, at_draws = evidence.draw_loo(
        draw_key, weight, position, gradient, True
    )
    found = evidence.bridge(
        weight, log_target(position) - at_particles, log_target(draws) - at_draws
    )
    return found.log_evidence, found.standard_error, found.islands.mean()


def test_the_bridge_is_right_and_its_error_honest():
    keys = random.split(random.key(0), 2_000)
    found, error, islands = jax.jit(lambda all_keys: jax.lax.map(one_bridge, all_keys))(
        keys
    )
    assert_mean(found, EXACT, resolution=0.01)
    assert_mean(islands, EXACT, resolution=0.02)
    z = (np.asarray(found) - EXACT) / np.asarray(error)
    assert 0.75 < z.std() < 1.0


def test_a_reference_equal_to_the_target_gives_the_evidence_exactly():
    ratio = jnp.full((4, 10), -3.25)
    found = evidence.bridge(jnp.full((4, 10), 0.1), ratio, ratio)
    np.testing.assert_allclose(found.log_evidence, -3.25, rtol=1e-6)
    np.testing.assert_allclose(found.standard_error, 0, atol=1e-6)
    np.testing.assert_allclose(found.overlap, 1, rtol=1e-5)


def test_weights_of_particles_count():
    keys = random.split(random.key(3), 400)

    def weighted(rng_key):
        particle_key, draw_key = random.split(rng_key)
        noise = random.normal(particle_key, (6, 300, 1))
        position = 0.7 + 1.4 * noise

        def target(x):
            return EXACT + jnp.sum(3 * x - jnp.exp(x) - jnp.log(2.0), -1)

        weight = jax.nn.softmax(target(position) + 0.5 * noise[..., 0] ** 2, -1)
        gradient = jnp.exp(position) - 3.0
        draws, at_particles, at_draws = evidence.draw_loo(
            draw_key, weight, position, gradient, True
        )
        return evidence.bridge(
            weight, target(position) - at_particles, target(draws) - at_draws
        ).log_evidence

    found = jax.jit(lambda all_keys: jax.lax.map(weighted, all_keys))(keys)
    assert_mean(found, EXACT, resolution=0.01)
