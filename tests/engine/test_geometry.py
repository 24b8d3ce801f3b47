import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import geometry
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.weights import normalise

NUM_ISLANDS, NUM_PARTICLES, DIM = 4, 30, 12


def gaussian_cloud():
    """Few unequally weighted draws, not from the Gaussian whose gradients they know."""
    keys = random.split(random.key(0), 3)
    shape = (NUM_ISLANDS, NUM_PARTICLES, DIM)
    position = 3.0 + random.t(keys[0], 5.0, shape) * jnp.linspace(0.3, 30.0, DIM)
    root = jnp.eye(DIM) + 0.4 * random.normal(keys[1], (DIM, DIM))
    precision = root @ root.T / jnp.outer(*(2 * [jnp.linspace(0.3, 30.0, DIM)]))
    weight = normalise(random.normal(keys[2], (NUM_ISLANDS, 1, NUM_PARTICLES)))
    return weight, position, (position - 1.0) @ precision, np.linalg.inv(precision)


factor_of = jax.jit(geometry.loo_factor, static_argnums=(3, 4))


def joint_factor(weight, position, gradient, dense):
    """Return the factor of all coordinates as one component."""
    parts = joint(position.shape[-1])
    found = factor_of(weight, position, gradient, parts, 256 if dense else 0)
    return found.blocks[0][:, 0]


def test_the_factor_of_a_gaussian_has_no_noise():
    weight, position, gradient, covariance = gaussian_cloud()
    factor = joint_factor(weight, position, gradient, True)
    assert np.array_equal(factor, np.tril(factor))
    found = np.asarray(factor @ jnp.swapaxes(factor, 1, 2))
    scale = np.sqrt(np.diag(covariance))
    error = (found - covariance) / np.outer(scale, scale)
    assert np.abs(error).max() < 0.02
    # The draws themselves have quite another covariance.
    plain = joint_factor(weight, position, jnp.zeros_like(gradient), True)
    far = np.asarray(plain[0] @ plain[0].T - covariance) / np.outer(scale, scale)
    assert np.abs(far).max() > 0.3


def test_noise_in_the_gradients_is_shrunk_away():
    keys = random.split(random.key(1), 2)
    position = random.normal(keys[0], (8, 60, 80))
    weight = jnp.full((8, 1, 60), 1 / 60)
    noisy = position + random.normal(keys[1], position.shape)  # a curvature of one
    factor = joint_factor(weight, position, noisy, True)
    found = np.asarray(factor[0] @ factor[0].T)
    apart = found - np.diag(np.diag(found))
    assert np.linalg.norm(apart, 2) < 0.3
    np.testing.assert_allclose(np.diag(found), 1.0, atol=0.3)


@pytest.mark.parametrize("dense", [True, False])
def test_a_factor_does_not_depend_on_the_island_itself(dense):
    weight, position, gradient, _ = gaussian_cloud()
    gradient = gradient + 0.1 * jnp.sin(position)
    before = joint_factor(weight, position, gradient, dense)
    moved = position.at[2].multiply(3.0)
    after = joint_factor(weight, moved, gradient.at[2].multiply(0.5), dense)
    np.testing.assert_allclose(after[2], before[2], rtol=1e-3, atol=1e-3)
    assert not np.allclose(after[1], before[1], rtol=0.05, atol=1e-3)


def test_where_the_curvature_is_not_positive_the_covariance_serves():
    weight, position, gradient, _ = gaussian_cloud()
    up = joint_factor(weight, position, -gradient, True)
    none = joint_factor(weight, position, jnp.zeros_like(gradient), True)
    np.testing.assert_allclose(up, none)
    assert np.isfinite(up).all() and (jnp.diagonal(up, axis1=1, axis2=2) > 0).all()


def test_a_regression_is_that_of_least_squares():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3)) * [0.1, 1.0, 30.0] + [0.0, 1.0, 5.0]
    x[:, 1] += 0.02 * x[:, 2]
    y = x @ rng.normal(size=(3, 2)) + rng.normal(size=(50, 2))
    moments = np.cov(np.hstack([x, y]).T)
    known = jnp.asarray(moments[:3, :3]), jnp.asarray(moments[:3, 3:])
    found = geometry.regress(*(each[None, None] for each in known))
    expected = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[0]
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-3, atol=1e-4)


def test_the_curvature_loses_the_share_of_it_that_is_noise():
    slope = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 3.0]])
    residual = np.array([0.3, 0.2, 0.4])
    variance = np.sum(slope**2, 0) + residual  # the positions have variance one
    known = (jnp.asarray(each)[None, None] for each in (np.eye(3), slope, variance, 23.0))
    factor = geometry.curvature_factor(*known, np.zeros((1, 3)))[0, 0]
    # Each of two slopes off the diagonal has the residual's variance over 20.
    noise = 2 * residual.sum() / 20 / 2
    keep = 1 - noise / (2 * (0.5**2 + 0.3**2))
    shrunk = keep * slope + (1 - keep) * np.diag(np.diag(slope))
    np.testing.assert_allclose(factor @ factor.T, np.linalg.inv(shrunk), rtol=1e-4)


def test_many_draws_are_hardly_shrunk_and_few_are():
    covariance = jnp.array([[4.0, 1.2, 0.0], [1.2, 1.0, 0.0], [0.0, 0.0, 9.0]])
    many, few = (jnp.full((1, 1), num_draws) for num_draws in (1e6, 10.0))
    factor = geometry.shrunk_factor(
        covariance[None, None], many, np.zeros((1, len(covariance)))
    )[0, 0]
    np.testing.assert_allclose(factor @ factor.T, covariance, rtol=1e-4, atol=1e-5)
    # One correlation of 0.6 and two of 0, from 10 draws: of 0.72 0.6 is noise.
    factor = geometry.shrunk_factor(
        covariance[None, None], few, np.zeros((1, len(covariance)))
    )[0, 0]
    expected = 1.2 * (1 - 0.6 / 0.72)
    np.testing.assert_allclose((factor @ factor.T)[0, 1], expected, rtol=1e-4)


@pytest.mark.parametrize("dense", [True, False])
def test_copies_of_a_particle_tell_nothing_of_the_spread(dense):
    weight, position, gradient, _ = gaussian_cloud()
    last = joint_factor(weight, position, gradient, dense)[:, None]
    # All but island 1 descend from one particle; island 1 sees nothing but copies.
    copies = jnp.broadcast_to(position[0, 0], position.shape).at[1].set(position[1])
    fresh = joint_factor(weight, copies, gradient, dense)[:, None]
    lost = geometry.is_collapsed(fresh, last)
    assert lost.shape == (NUM_ISLANDS, *(1,) * (last.ndim - 1))
    assert list(lost.ravel()) == [False, True, False, False]
    assert not geometry.is_collapsed(last * 0.01, last).any()
    assert geometry.is_collapsed(last.at[2].set(jnp.nan), last).ravel()[2]


@pytest.mark.parametrize("dense", [True, False])
def test_a_component_collapses_by_itself(dense):
    weight, position, gradient, _ = gaussian_cloud()
    parts = partition(np.arange(DIM) // 3)
    factor = factor_of(jnp.repeat(weight, 4, 1), position, gradient, parts, 8 * dense)
    (last,) = factor.blocks
    fresh = last.at[1, 2].multiply(1e-4).at[3, 0, 1].set(jnp.nan)
    lost = geometry.is_collapsed(fresh, last)
    expected = np.zeros((NUM_ISLANDS, 4), bool)
    expected[1, 2] = expected[3, 0] = True
    np.testing.assert_array_equal(lost.reshape(NUM_ISLANDS, 4), expected)


#: Sizes of components, in blocks of one, four and seven coordinates.
SIZES = [2, 4, 1, 7, 2]
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), SIZES))
ALONE = {size: joint(size) for size in SIZES}


@pytest.mark.parametrize(
    ("most_dense", "gradients"),
    [(8, "noisy"), (8, "none"), (8, "few particles"), (4, "noisy"), (0, "noisy")],
)
def test_components_have_the_factors_that_each_has_alone(most_dense, gradients):
    parts, num_islands = partition(LABELS), 4
    num_particles = 4 if gradients == "few particles" else 25
    keys = random.split(random.key(3), 3)
    noise = random.t(keys[0], 5.0, (num_islands, num_particles, parts.dim))
    root = jnp.eye(parts.dim) + 0.3 * random.normal(keys[1], (parts.dim, parts.dim))
    position = 2.0 + noise @ root.T
    gradient = jnp.zeros_like(position) if gradients == "none" else position + noise**3 / 9
    shape = (num_islands, parts.num_components, num_particles)
    weight = normalise(random.normal(keys[2], shape))
    found = factor_of(weight, position, gradient, parts, most_dense)
    owner = 0
    for block, index in zip(found.blocks, parts.blocks, strict=True):
        assert (block.ndim == 4) == (index.shape[1] <= most_dense)
        for component in range(len(index)):
            mine, size = parts.owner == owner, parts.sizes[owner]
            alone = factor_of(
                weight[:, owner, None],
                position[..., mine],
                gradient[..., mine],
                ALONE[size],
                8 if block.ndim == 4 else 0,
            ).blocks[0]
            real = (slice(size),) * (block.ndim - 2)
            together = block[:, component][:, *real]
            np.testing.assert_allclose(together, alone[:, 0], rtol=1e-3, atol=1e-4)
            owner += 1
