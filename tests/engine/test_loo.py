import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import loo
from numpyro_jala.engine.weights import normalise

ROOT = jnp.array([[1.0, 0.5, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 0.3]])


@pytest.fixture(params=[1, 3])
def particles(request):
    """Weights (islands, components, particles), and positions of unequal components."""
    num_components = request.param
    weight = normalise(random.normal(random.key(0), (4, num_components, 50)))
    position = random.normal(random.key(1), (4, num_components, 50, 3)) @ ROOT
    scale = jnp.linspace(1.0, 0.4, num_components)[:, None, None]
    return weight, scale * position + jnp.array([100.0, 0.0, -3.0])


def by_hand(weight, position, islands):
    """The covariance of the particles of some islands, which have equal shares."""
    rows = np.asarray(position, float)[islands].reshape(-1, 3)
    share = np.asarray(weight, float)[islands].reshape(-1) / len(islands)
    return np.cov(rows.T, aweights=share, ddof=0)


def test_an_island_learns_its_covariance_from_the_others(particles):
    weight, position = particles
    found = loo.loo_covariance(weight, position, position)
    variance = loo.loo_variance(weight, position)
    products = loo.loo_products(weight, position, position[..., ::-1])
    mean = loo.loo_mean(weight, position)
    for island, component in np.ndindex(*weight.shape[:2]):
        others = [j for j in range(4) if j != island]
        at = island, component
        own = weight[:, component], position[:, component]
        expected = by_hand(*own, others)
        np.testing.assert_allclose(found[at], expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(variance[at], np.diag(expected), rtol=1e-3)
        corner = np.diag(expected[:, ::-1])
        np.testing.assert_allclose(products[at], corner, rtol=2e-3, atol=1e-3)
        each = np.einsum("jn,jnd->jd", *own)
        np.testing.assert_allclose(mean[at], each[others].mean(0), rtol=1e-4, atol=1e-4)


def test_what_an_island_learns_does_not_depend_on_its_own_particles(particles):
    weight, position = particles
    moved = position.at[1].multiply(2.0)
    for learn in (loo.loo_mean, loo.loo_variance):
        before, after = learn(weight, position), learn(weight, moved)
        np.testing.assert_allclose(after[1], before[1], rtol=1e-3, atol=1e-3)
        assert not np.allclose(after[0], before[0], rtol=0.05)
    # Not even in the last digit, of sums that are not centred.
    values = position[..., 0].sum(-1)
    others = values.at[1].multiply(1e6)
    np.testing.assert_array_equal(loo.loo_sum(values)[1], loo.loo_sum(others)[1])


def test_a_component_does_not_learn_from_another():
    weight = normalise(random.normal(random.key(0), (4, 2, 50)))
    position = random.normal(random.key(1), (4, 2, 50, 3))
    before = loo.loo_covariance(weight, position, position)
    after = loo.loo_covariance(weight, *(2 * [position.at[:, 1].multiply(9.0)]))
    np.testing.assert_array_equal(after[:, 0], before[:, 0])
    np.testing.assert_allclose(after[:, 1], 81 * before[:, 1], rtol=1e-3)


def test_a_dead_island_is_not_asked(particles):
    weight, position = particles
    last = weight.shape[1] - 1
    dead = weight.at[3, last].set(0.0)  # in one of its components
    found = loo.loo_covariance(dead, position, position)[0]
    for component in range(last + 1):
        living = [1, 2] if component == last else [1, 2, 3]
        expected = by_hand(weight[:, component], position[:, component], living)
        np.testing.assert_allclose(found[component], expected, rtol=2e-3, atol=1e-4)
    assert loo.is_alive(dead).sum() == dead[..., 0].size - 1
