import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy.stats import multivariate_normal, norm

from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.inference import evidence
from numpyro_jala.inference.evidence import Gaussian
from tests.tools import assert_mean, replicate

EXACT = 1.7


def test_log_density_is_that_of_a_normal():
    factor = jnp.array([[1.5, 0.0], [0.4, 0.7]])
    mean, position = jnp.array([1.0, -2.0]), jnp.array([[0.3, 0.1], [2.0, -3.0]])
    gaussian = Gaussian(mean[None], Factor((factor[None, None],)))
    expected = jax.scipy.stats.multivariate_normal.logpdf(position, mean, factor @ factor.T)
    parts = joint(2)
    np.testing.assert_allclose(
        evidence.log_density(gaussian, parts, position[None])[0, 0], expected, rtol=1e-5
    )
    diagonal = Gaussian(mean[None], Factor((jnp.array([[[1.5, 0.7]]]),)))
    expected = norm([1, -2], [1.5, 0.7]).logpdf(np.asarray(position)).sum(-1)
    np.testing.assert_allclose(
        evidence.log_density(diagonal, parts, position[None])[0, 0], expected, rtol=1e-5
    )
    many = jnp.zeros((1, 100_000, 2))
    draws, _, at_draws = evidence.draw_loo(random.key(0), gaussian, parts, many)
    np.testing.assert_allclose(np.cov(draws[0].T), factor @ factor.T, atol=0.05)
    again = evidence.log_density(gaussian, parts, draws)
    np.testing.assert_allclose(at_draws, again, rtol=1e-5)


@pytest.mark.parametrize("most_dense", [8, 0])
def test_each_component_has_the_gaussian_that_the_others_fit(most_dense):
    parts = partition(np.array([2, 1, 2, 0, 1, 2]))
    keys = random.split(random.key(0), 2)
    position = 2.0 + random.normal(keys[0], (3, 400, 6)) * jnp.arange(1.0, 7.0)
    weight = jax.nn.softmax(random.normal(keys[1], (3, 3, 400)), -1)
    flat = jnp.zeros_like(position)
    found = jax.jit(evidence.fit_loo, static_argnums=(3, 4))(
        weight, position, flat, parts, most_dense
    )
    density = jax.jit(evidence.log_density, static_argnums=1)(found, parts, position)
    assert density.shape == weight.shape
    others, rows = [1, 2], np.asarray(position, float)
    for component in range(3):
        mine = np.flatnonzero(parts.owner == component)
        share = np.asarray(weight[1:, component], float).reshape(-1) / 2
        seen = rows[others][..., mine].reshape(-1, mine.size)
        mean = share @ seen
        np.testing.assert_allclose(found.mean[0, mine], mean, rtol=1e-3, atol=1e-3)
        covariance = np.diag(share @ (seen - mean) ** 2)
        if most_dense:  # of independent coordinates up to what is not shrunk away
            covariance = np.cov(seen.T, aweights=share, ddof=0).reshape(2 * [mine.size])
        expected = multivariate_normal(mean, covariance).logpdf(rows[0][:, mine])
        np.testing.assert_allclose(density[0, component], expected, rtol=0.1, atol=0.1)


def drawn(rng_key, weight, position, gradient):
    """Draw from the Gaussians of one component; return log-densities at both ends."""
    parts = joint(position.shape[-1])
    gaussian = evidence.fit_loo(weight[:, None], position, gradient, parts, 256)
    draws, *densities = evidence.draw_loo(rng_key, gaussian, parts, position)
    return draws, *(density[:, 0] for density in densities)


def one_bridge(rng_key):
    """Log-gamma particles, skewed, with evidence exp(EXACT); islands fit each other."""
    particle_key, draw_key = random.split(rng_key)
    shape = jnp.array([3.0, 1.5])
    position = jnp.log(random.gamma(particle_key, shape, (12, 40, 2)))
    weight = jnp.full((12, 40), 1 / 40)

    def log_target(x):
        return EXACT + jnp.sum(shape * x - jnp.exp(x) - jax.lax.lgamma(shape), -1)

    gradient = jnp.exp(position) - shape
    draws, at_particles, at_draws = drawn(draw_key, weight, position, gradient)
    found = evidence.bridge(
        weight, log_target(position) - at_particles, log_target(draws) - at_draws
    )
    return found.log_evidence, found.standard_error, found.islands.mean()


def test_the_bridge_is_right_and_its_error_honest():
    keys = random.split(random.key(0), 2_000)
    found, error, islands = replicate(one_bridge, keys)
    assert_mean(found, EXACT, resolution=0.01)
    assert_mean(islands, EXACT, resolution=0.02)
    z = (np.asarray(found) - EXACT) / np.asarray(error)
    assert 0.75 < z.std() < 1.0


def test_the_error_of_quasi_random_draws_is_that_between_their_shifts():
    """A shifted lattice integrates a smooth periodic function nearly exactly."""
    shift = random.uniform(random.key(0), (6, 1))
    ratio = jnp.sin(2 * jnp.pi * (jnp.arange(32) / 32 + shift))
    weight, certain = jnp.full((6, 10), 0.1), jnp.full((6, 10), 0.2)
    errors = [
        float(evidence.bridge(weight, certain, ratio, is_quasi).standard_error)
        for is_quasi in (True, False)
    ]
    assert errors[0] < 1e-4
    assert errors[1] > 1e-2


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
        draws, at_particles, at_draws = drawn(draw_key, weight, position, gradient)
        return evidence.bridge(
            weight, target(position) - at_particles, target(draws) - at_draws
        ).log_evidence

    found = replicate(weighted, keys)
    assert_mean(found, EXACT, resolution=0.01)
