"""Coordinates of a Laplace approximation, on models whose integrals are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import laplace, sparsity
from numpyro_jala.engine.banded import Band
from numpyro_jala.engine.laplace import Whitening
from numpyro_jala.engine.partition import joint, partition

DIM = 60
Y = np.cumsum(np.random.default_rng(0).normal(size=DIM)).astype(np.float32)
PARAMS = jnp.array([-0.3, 0.4])


def walk(params, temperature, x):
    """Return the potential of a random walk plus noise, starting at one."""
    step, noise = jnp.exp(params)
    steps = jnp.diff(x, prepend=1.0)
    square = (steps / step) ** 2 + ((Y - x) / noise) ** 2
    return 0.5 * square.sum()[None] + DIM * (params.sum() + jnp.log(2 * jnp.pi))


def walk_log_likelihood(params):
    step, noise = jnp.exp(params)
    times = np.minimum.outer(np.arange(DIM), np.arange(DIM)) + 1.0
    covariance = step**2 * times + noise**2 * jnp.eye(DIM)
    error = Y - 1.0
    square = error @ jnp.linalg.solve(covariance, error)
    log_det = jnp.linalg.slogdet(covariance)[1]
    return -0.5 * (square + log_det + DIM * jnp.log(2 * jnp.pi))


def find_mode(energy, band, start):
    return jax.jit(lambda start: laplace.find_mode(energy, band, start))(start)


def whitening(potential=walk, parts=None, width=1):
    parts = joint(DIM) if parts is None else parts
    band = Band(np.arange(DIM), width)

    def energy(params, x):
        return potential(params, jnp.ones(parts.num_components), x).sum()

    return Whitening(potential, energy, parts, band, jnp.zeros(DIM))


@pytest.mark.parametrize("width", [1, DIM])
def test_a_gaussian_posterior_has_exact_evidence_score_and_information(width):
    noise = random.normal(random.key(0), (5, DIM))

    @jax.jit
    def value_score_and_curvature(noise):
        potential_fn = whitening(width=width).potential_at(PARAMS)

        def log_evidence(params, z):
            standard = 0.5 * z @ z + 0.5 * DIM * jnp.log(2 * jnp.pi)
            return (standard - potential_fn(params, jnp.ones(1), z))[0]

        return [
            jax.vmap(function, (None, 0))(PARAMS, noise)
            for function in (
                log_evidence,
                jax.jacfwd(log_evidence),
                jax.hessian(log_evidence),
            )
        ]

    exact = walk_log_likelihood
    value, score, curvature = value_score_and_curvature(noise)
    np.testing.assert_allclose(value, exact(PARAMS), rtol=1e-5)
    expected = jnp.broadcast_to(jax.jit(jax.grad(exact))(PARAMS), score.shape)
    np.testing.assert_allclose(score, expected, rtol=1e-3)
    expected = jnp.broadcast_to(jax.jit(jax.hessian(exact))(PARAMS), curvature.shape)
    np.testing.assert_allclose(curvature, expected, rtol=1e-3, atol=1e-2)


def test_the_reference_is_a_widened_standard_normal():
    potential_fn = jax.jit(lambda *at: whitening().potential_at(PARAMS)(*at))
    z = jnp.linspace(-2.0, 1.0, DIM)
    scale = 1 + laplace.WIDEN / DIM**0.5
    expected = -jax.scipy.stats.norm.logpdf(z, 0.0, scale).sum()
    np.testing.assert_allclose(
        potential_fn(PARAMS, jnp.zeros(1), z)[0], expected, rtol=1e-5
    )


def test_components_have_their_own_volumes_and_references():
    """Two chains, of which each has the evidence and the start that it has alone."""
    labels = (np.arange(DIM) >= 20).astype(int)
    parts = partition(labels)

    def two(params, temperature, x):
        precision = jnp.where(labels == 0, jnp.exp(params[0]), 3.0)
        square = 0.5 * precision * (x - 1.0) ** 2
        return jnp.zeros(2).at[parts.owner].add(square)

    potential_fn = jax.jit(lambda *at: whitening(two, parts).potential_at(PARAMS)(*at))
    z = random.normal(random.key(1), (DIM,))
    found = potential_fn(PARAMS, jnp.ones(2), z)
    sizes, squares = parts.sizes, jnp.zeros(2).at[parts.owner].add(0.5 * z**2)
    precision = jnp.where(sizes == 20, jnp.exp(PARAMS[0]), 3.0)
    np.testing.assert_allclose(found, squares + 0.5 * sizes * jnp.log(precision), rtol=1e-5)
    scale = 1 + laplace.WIDEN / np.sqrt(sizes[parts.owner])
    log_density = jax.scipy.stats.norm.logpdf(z, 0.0, scale)
    expected = -jnp.zeros(2).at[parts.owner].add(log_density)
    first = potential_fn(PARAMS, jnp.zeros(2), z)
    np.testing.assert_allclose(first, expected, rtol=1e-5)


def test_latents_and_whitened_rows_are_each_others_inverse():
    band = Band(np.arange(DIM), 1)
    z = random.normal(random.key(2), (4, DIM))

    @jax.jit
    def there_and_back(z):
        found = whitening().coordinates(PARAMS)
        x = laplace.to_position(found, band, z)
        return laplace.to_whitened(found, band, x), found.centre

    back, centre = there_and_back(z)
    np.testing.assert_allclose(back, z, atol=1e-4)
    # The centre is the posterior's mean.
    gradient = jax.grad(lambda x: walk(PARAMS, None, x)[0])(centre)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-3)


def test_a_mode_is_found_from_afar_and_where_newton_steps_would_fail():
    def energy(x):  # concave in the tails
        return jnp.sum(jnp.log1p((x - 3.0) ** 2)) + 0.001 * jnp.sum(x**2)

    mode = find_mode(energy, Band(np.arange(5), 5), 40.0 * jnp.ones(5))
    assert bool(mode.arrived)
    np.testing.assert_allclose(mode.position, 3.0, atol=0.02)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_without_a_mode_none_is_found(start):
    mode = find_mode(lambda x: -jnp.sum(x**2), Band(np.arange(3), 3), start + jnp.zeros(3))
    assert not bool(mode.arrived)


def test_rounding_of_a_large_potential_is_no_failed_step():
    """Units of the last digit are 0.03 nats: the last step gains less."""

    def energy(x):
        return 0.5 * jnp.sum((x - 1.0) ** 2 * jnp.arange(1.0, DIM + 1)) + 3e5

    start = jnp.ones(DIM).at[3].add(0.05)  # 0.005 nats above the mode
    mode = find_mode(energy, Band(np.arange(DIM), 1), start)
    assert bool(mode.arrived) and float(mode.damping) == 0.0
    np.testing.assert_allclose(mode.position, 1.0, atol=1e-5)


@pytest.mark.parametrize("centre, expected", [(6.0, True), (0.5, False)])
def test_a_potential_is_known_to_be_convex_around_its_mode(centre, expected):
    """A product of two latents, which is convex only where data say much of it."""

    def energy(x):
        return (
            0.5 * jnp.sum(x**2) / 4
            + 0.5 * 100.0 * jnp.sum((x[:-1] - x[1:]) ** 2) * (centre > 1)
            + 0.5 * jnp.sum((x[1:] * x[:-1] - centre**2) ** 2) * (centre < 1)
        )

    band = Band(np.arange(20), 1)
    mode = find_mode(energy, band, centre * jnp.ones(20))
    assert bool(mode.arrived)
    is_convex = jax.jit(lambda mode: laplace.is_convex(energy, band, mode))(mode)
    assert bool(is_convex) == expected


@pytest.mark.parametrize("lag, width", [(1, 2), (2, 2), (5, 8), (20, 40), (50, 300)])
def test_the_width_of_a_band_is_found_in_any_order(lag, width):
    dim = 300
    order = np.random.default_rng(0).permutation(dim)
    matrix = np.eye(dim) + 0.3 * np.eye(dim, k=lag) + 0.3 * np.eye(dim, k=-lag)
    shuffled = np.zeros((dim, dim))
    shuffled[np.ix_(order, order)] = matrix
    products = sparsity.band_probes(order) @ shuffled
    assert sparsity.find_band(order, products[None]).width == width
