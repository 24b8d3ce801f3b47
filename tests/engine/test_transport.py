"""What particles do when their target moves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import smc, transport
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.weights import normalise


def one_sided(rng_key, edge):
    """Draws of N(0, 1) above an edge, in islands, with the score of their mean."""
    draws = random.truncated_normal(rng_key, edge, 9.0, (8, 64))
    zero = jnp.zeros((8, 1, 64))
    return smc.Cloud(
        position=draws[..., None],
        momentum=jnp.zeros((8, 64, 1)),
        log_weight=zero,
        potential=draws[:, None] ** 2 / 2,
        gradient=draws[..., None],
        slope=zero,
        scores=-draws[:, None, :, None],
        log_evidence=jnp.zeros((8, 1)),
    )


def unit_factor(dense):
    return Factor((jnp.ones((8, 1, 1, 1) if dense else (8, 1, 1)),))


@pytest.mark.parametrize("dense", [True, False])
def test_the_score_is_right_also_where_the_density_jumps(dense):
    weight = jnp.full((8, 1, 64), 1 / 64)
    for edge in (-9.0, 0.3):
        cloud = one_sided(random.key(1), edge)
        last = jnp.zeros((8, 2, 1))
        found = transport.learn(
            weight, cloud, cloud.rates, unit_factor(dense), joint(1), last, jnp.zeros(())
        )
        plain = cloud.scores.mean()
        if edge < -8:  # smooth: the score is exact, and plain draws are noisy
            assert abs(found.rate[..., 1].mean()) < 0.5 * abs(plain)
        else:
            np.testing.assert_allclose(found.rate[..., 1].mean(), plain, rtol=1e-5)
            assert (found.shift == 0).all()


def test_a_mean_is_zero_up_to_its_noise():
    weight = jnp.full((4, 2, 100), 0.01)
    noise = random.normal(random.key(0), (4, 100))
    noise = (noise - noise.mean()) / noise.std()
    for shift, expected in ((0.2, True), (0.3, False)):  # the standard error is 1/20
        columns = jnp.stack([noise + shift, noise], -1)
        # The second component has the columns the other way round.
        both = jnp.stack([columns, columns[..., ::-1]], 1)
        found = transport.is_centred(weight, both)
        assert found.tolist() == [[expected, True], [True, expected]]


def test_covariances_weigh_particles_and_are_summed_over_components():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 2, 9, 2)) * [1.0, 3.0] + rng.normal(size=(3, 2, 1, 2))
    weight = rng.dirichlet(np.ones(9), size=(3, 2))
    weight[1, 1] = 0.0  # a dead island
    expected = [
        np.cov(
            values[islands, component].reshape(-1, 2).T,
            aweights=weight[islands, component].reshape(-1),
            ddof=0,
        )
        for component, islands in enumerate(([0, 1, 2], [0, 2]))
    ]
    given = jnp.asarray(weight), jnp.asarray(values)
    found = transport.summed_covariance(*given)
    np.testing.assert_allclose(found, sum(expected), rtol=1e-5, atol=1e-6)
    each = [np.diag(covariance) for covariance in expected]
    np.testing.assert_allclose(transport.variance(*given), each, rtol=1e-5)


@pytest.mark.parametrize("dense", [True, False])
def test_islands_at_different_temperatures_agree_on_the_way(dense):
    """In x ~ N(θ, 1), y | x ~ N(x, s²) the posterior's mean moves by 1 / (1 + T / s²)."""
    weight, size = jnp.full((8, 1, 64), 1 / 64), 0.1
    temperature = 1e-2 * jnp.exp(jnp.linspace(-0.1, 0.1, 8))[:, None]
    precision = 1 + temperature / size**2
    mean = temperature / size**2 * 100.0 / precision  # at θ = 0, with y = 100
    noise = random.normal(random.key(2), (8, 64))
    x = 0.95 * mean + noise / jnp.sqrt(precision)  # which lags behind
    rows = jnp.zeros((8, 1, 64))
    cloud = smc.Cloud(
        position=x[..., None],
        momentum=jnp.zeros((8, 64, 1)),
        log_weight=rows,
        potential=rows,
        gradient=((x - mean) * precision)[..., None],
        slope=rows,
        scores=-x[:, None, :, None],
        log_evidence=jnp.zeros((8, 1)),
    )
    last = jnp.zeros((8, 2, 1))
    found = transport.learn(
        weight, cloud, cloud.rates, unit_factor(dense), joint(1), last, jnp.zeros(())
    )
    # Particles shift by minus this. The average over the others' temperatures is right to
    # a tenth, and so are covariances of a few hundred draws.
    np.testing.assert_allclose(-found.learned[:, 1], 1 / precision, rtol=0.2)


SIZES = [2, 4, 1, 7, 2]
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), SIZES))
ALONE = {size: joint(size) for size in SIZES}
learn = jax.jit(transport.learn, static_argnums=4)


def several():
    """Components whose rates depend on their own gradients, up to noise, or not at all."""
    parts, keys = partition(LABELS), random.split(random.key(3), 6)
    shape = (4, parts.num_components, 30)
    position = 1.0 + random.normal(keys[0], (4, 30, parts.dim))
    gradient = position - 1.0 + 0.1 * random.normal(keys[1], position.shape)
    along = random.normal(keys[2], (parts.dim, 3)) + 1.0
    rate = jnp.stack([parts.total(gradient * column) for column in along.T], -1)
    noise = random.normal(keys[3], (*shape, 3))
    # Of the third component the second column is noise, which is not to be followed.
    rate = (rate + 0.3 * noise).at[:, 2, :, 1].set(0.01 * noise[:, 2, :, 1])
    zero = jnp.zeros(shape)
    log_weight = random.normal(keys[4], shape)
    cloud = smc.Cloud(
        position=position,
        momentum=position[..., :0],
        log_weight=log_weight,
        potential=zero,
        gradient=gradient,
        slope=rate[..., 0],
        scores=rate[..., 1:],
        log_evidence=jnp.zeros(shape[:2]),
    )
    return parts, cloud, random.normal(keys[5], (4, 3, parts.dim))


@pytest.mark.parametrize("most_dense", [8, 4, 0])
def test_components_learn_what_each_learns_alone(most_dense):
    parts, cloud, last = several()
    weight, memory = normalise(cloud.log_weight), jnp.asarray(0.75)
    blocks = []
    for index in parts.blocks:
        count, size = index.shape
        scale = jnp.where(jnp.asarray(index < parts.dim), 1.5, 1e-10)
        block = jnp.broadcast_to(scale, (4, count, size))
        is_dense = size <= most_dense
        blocks.append(block[..., None] * jnp.eye(size) if is_dense else block)
    found = learn(weight, cloud, cloud.rates, Factor(tuple(blocks)), parts, last, memory)
    is_dense = {1: most_dense >= 1, 2: most_dense >= 4, 4: most_dense >= 4}
    is_dense[7] = most_dense >= 7
    for owner, size in enumerate(parts.sizes):
        mine = parts.owner == owner
        own = slice(owner, owner + 1)
        alone_cloud = cloud._replace(
            position=cloud.position[..., mine],
            gradient=cloud.gradient[..., mine],
            slope=cloud.slope[:, own],
            scores=cloud.scores[:, own],
        )
        block = jnp.full((4, 1, size), 1.5)
        if is_dense[int(size)]:
            block = block[..., None] * jnp.eye(size)
        alone = learn(
            weight[:, own],
            alone_cloud,
            alone_cloud.rates,
            Factor((block,)),
            ALONE[size],
            last[..., mine],
            memory,
        )
        close = {"rtol": 1e-3, "atol": 1e-4}
        np.testing.assert_allclose(found.learned[..., mine], alone.learned, **close)
        np.testing.assert_allclose(found.shift[..., mine], alone.shift, **close)
        np.testing.assert_allclose(found.rate[:, own], alone.rate, **close)
    # Some are followed, and some not.
    taken = (found.shift != 0).any(0)
    noisy = parts.owner == 2
    assert not taken[1, noisy].any() and taken[:, ~noisy].any()
