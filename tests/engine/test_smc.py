"""The engine on targets with exact answers, neither symmetric nor centred."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

from numpyro_jala.engine import langevin, smc
from numpyro_jala.engine.adaptation import momentum_memory
from numpyro_jala.engine.langevin import Kernel
from numpyro_jala.engine.resampling import systematic
from numpyro_jala.engine.smc import Target
from tests.tools import assert_mean

NUM_STEPS, NUM_PARTICLES = 4, 16
SLANT = jnp.array([0.8, -0.3])
FACTORS = {
    "dense": jnp.array([[0.8, 0.0], [0.4, 0.6]]),
    "diagonal": jnp.array([0.9, 0.5]),
    "none": jnp.array(0.7),
}


def potential(params, temperature, x):
    """From a wide normal to the density of logs of gamma variables: skewed."""
    wide = 0.5 * jnp.sum(x**2) / 4 + jnp.log(2 * jnp.pi * 4)
    shape = jnp.exp(params) + 2
    skewed = jnp.sum(jnp.exp(x) - shape * x) + jnp.sum(SLANT * x)
    return (1 - temperature) * wide + temperature * skewed


def exact_evidence(params):
    return np.prod(
        [
            np.exp(jax.lax.lgamma(float(np.exp(p)) + 2 - float(s)))
            for p, s in zip(np.asarray(params), np.asarray(SLANT), strict=True)
        ]
    )


def run_steps(rng_key, factor, step_size, shift, threshold, pause, memory):
    start_key, momentum_key, *keys = random.split(rng_key, 2 + NUM_STEPS)
    position = 2 * random.normal(start_key, (1, NUM_PARTICLES, 2))
    params = jnp.array([0.3, -0.2])
    found, _ = smc.evaluate_model(potential, Target(params, jnp.zeros(1)), position, True)
    momentum = random.normal(momentum_key, position.shape)
    cloud = smc.initial_cloud(position, momentum, found, jnp.zeros(()))
    one = lambda value: jnp.asarray(value)[None]  # noqa: E731
    for i, key in enumerate(keys):
        params = params + jnp.array([0.05, -0.1])
        target = Target(params, jnp.full((1,), (i + 1) / NUM_STEPS))
        evaluate = lambda x, t=target: smc.evaluate_model(potential, t, x, True)  # noqa: E731
        kernel = Kernel(one(step_size), one(factor), one(shift), one(memory))
        move_key, pause_key, resample_key = random.split(key, 3)
        cloud, _, _ = smc.step(move_key, cloud, kernel, evaluate, False)
        if pause:
            kernel = Kernel(one(pause), one(factor), 0 * one(shift), one(memory))
            cloud, _, _ = smc.step(pause_key, cloud, kernel, evaluate, True)
        due = smc.is_due(cloud, threshold)
        cloud = smc.resample(resample_key, cloud, systematic, due)
    weight = jnp.exp(cloud.log_evidence + cloud.log_weight[0])
    x, m = cloud.position[0, :, 0], cloud.momentum[0, :, 0]
    moments = jnp.mean(weight * jnp.stack([jnp.ones_like(x), x, m, m**2, x * m]), -1)
    return moments, params


@pytest.mark.parametrize(
    ("kind", "step_size", "shift", "threshold", "pause", "memory"),
    [
        ("none", 0.05, (0.0, 0.0), 0.0, 0.0, 0.0),
        ("dense", 0.3, (0.0, 0.0), 0.6, 0.0, 0.7),
        ("diagonal", 0.1, (0.05, -0.1), 1.0, 0.8, 0.0),
        ("dense", 0.0, (0.05, 0.05), 0.7, 1.5, 0.5),
        ("diagonal", 0.0, (0.0, 0.0), 0.7, 2.5, 1.0),
    ],
)
def test_evidence_and_moments_are_unbiased(
    kind, step_size, shift, threshold, pause, memory
):
    arguments = (FACTORS[kind], step_size, jnp.array(shift), threshold, pause, memory)
    run = jax.jit(jax.vmap(lambda key: run_steps(key, *arguments)))
    moments, params = run(random.split(random.key(4), 40_000))
    mean, x, m, m_squared, product = moments.T / exact_evidence(params[0])
    assert_mean(mean, 1.0, resolution=0.025)
    expected = jax.scipy.special.digamma(jnp.exp(params[0, 0]) + 2 - SLANT[0])
    assert_mean(x, float(expected), resolution=0.035)
    # The momentum is standard normal, whatever the position.
    assert_mean(m, 0.0, resolution=0.05)
    assert_mean(m_squared, 1.0, resolution=0.05)
    assert_mean(product, 0.0, resolution=0.05)


@pytest.mark.parametrize("kind", FACTORS)
def test_the_move_has_the_drift_and_the_noise_of_langevin(kind):
    kernel = Kernel(0.2, FACTORS[kind], jnp.array([1.0, 2.0]), 0.0)
    gradient = jnp.tile(jnp.array([0.5, -1.5]), (200_000, 1))
    start = jnp.zeros_like(gradient)
    moved = langevin.move(random.key(0), kernel, start, gradient, start[:, :0])
    root = FACTORS[kind] if kind == "dense" else FACTORS[kind] * jnp.eye(2)
    metric = root @ root.T
    expected = jnp.array([1.0, 2.0]) - 0.2 * metric @ gradient[0]
    for axis in range(2):
        assert_mean(moved.position[:, axis], float(expected[axis]), resolution=0.01)
    np.testing.assert_allclose(np.cov(moved.position.T), 0.4 * metric, atol=0.005)


def test_a_gradient_that_is_not_finite_is_harmless():
    kernel = Kernel(0.1, jnp.array(1.0), jnp.zeros(2), 0.0)
    gradient = jnp.array([[jnp.nan, 1.0], [jnp.inf, 0.0]])
    assert np.isfinite(langevin.pull(kernel, gradient)).all()


@pytest.mark.parametrize("columns", [2, 0])
def test_a_test_refuses_moves_and_leaves_weights_and_derivatives_consistent(columns):
    target = Target(jnp.array([0.3, -0.2]), jnp.ones(1))
    evaluate = lambda x: smc.evaluate_model(potential, target, x, True)  # noqa: E731
    position = random.normal(random.key(0), (1, 200, 2))
    momentum = 0 * position[..., :columns]
    cloud = smc.initial_cloud(position, momentum, evaluate(position)[0], jnp.zeros(()))
    cloud = cloud._replace(log_weight=random.normal(random.key(1), (1, 200)))
    kernel = Kernel(jnp.array([1.5]), jnp.ones(1), jnp.zeros((1, 2)), jnp.zeros(1))
    new, _, info = smc.step(random.key(2), cloud, kernel, evaluate, True)
    stayed = (new.position == cloud.position).all(-1)
    assert 20 < stayed.sum() < 180 and info.died == 0
    assert (info.increment[~stayed] > info.increment.min()).all()
    np.testing.assert_array_equal(new.log_weight, cloud.log_weight)
    again = evaluate(new.position)[0]
    for name, true in again._asdict().items():
        np.testing.assert_allclose(getattr(new, name), true, rtol=1e-5)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1_000)])
def test_noise_in_a_row_is_the_same_noise(shape):
    key, size = random.key(4), math.prod(shape)
    drawn = langevin.draw_noise(key, shape, jnp.float32)
    np.testing.assert_array_equal(drawn.ravel(), random.normal(key, (size,), jnp.float32))
    np.testing.assert_array_equal(drawn, random.normal(key, shape, jnp.float32))


def test_an_island_without_living_particles_is_not_resampled():
    log_weight = jnp.array([[-jnp.inf, -jnp.inf], [0.0, -9.0], [0.0, 0.1]])
    rows = jnp.zeros((3, 2))
    columns = (rows, rows[..., None], rows, rows[..., None])
    cloud = smc.Cloud(rows[..., None], rows[..., None], log_weight, *columns, rows[:, 0])
    np.testing.assert_array_equal(smc.is_due(cloud, 0.9), [False, True, False])


def test_resampling_settles_the_mean_weight_and_keeps_the_evidence():
    position = jnp.arange(8.0).reshape(2, 4, 1)
    log_weight = jnp.log(jnp.array([[0.1, 0.2, 0.3, 5.4], [1.0, 1.0, 1.0, 1.1]]))
    rows = position[..., 0]
    settled = jnp.array([0.5, -1.0])
    columns = (rows, position, rows, position)
    cloud = smc.Cloud(position, position, log_weight, *columns, settled)
    due = smc.is_due(cloud, 0.5)
    np.testing.assert_array_equal(due, [True, False])
    new = smc.resample(random.key(0), cloud, systematic, due)
    np.testing.assert_allclose(smc.log_evidence(cloud)[0], 0.5 + np.log(1.5), rtol=1e-5)
    np.testing.assert_allclose(smc.log_evidence(new), smc.log_evidence(cloud), rtol=1e-6)
    assert (new.log_weight[0] == 0).all()
    assert (new.log_weight[1] == log_weight[1]).all()
    for field in (new.position, new.momentum, new.gradient, new.scores):
        np.testing.assert_array_equal(field[..., 0], new.potential)
    np.testing.assert_array_equal(new.slope, new.potential)
    assert (new.potential[0] == 3).sum() >= 3


@pytest.mark.parametrize("columns", [1, 0])
def test_a_particle_that_leaves_the_support_dies_and_the_rest_live(columns):
    def cliff(params, temperature, x):
        return jnp.where(x[0] > 0, -jnp.log(x[0]) + x[0], jnp.nan)

    target = Target(jnp.zeros(0), jnp.ones(1))
    position = jnp.array([[[0.01], [2.0], [3.0]]])
    found, _ = smc.evaluate_model(cliff, target, position, True)
    cloud = smc.initial_cloud(position, 0 * position[..., :columns], found, jnp.zeros(()))
    shift = jnp.array([[-0.5]])
    kernel = Kernel(jnp.array([1e-6]), jnp.ones(1), shift, jnp.zeros(1))
    evaluate = lambda x: smc.evaluate_model(cliff, target, x, True)  # noqa: E731
    kept, _, info = smc.step(random.key(0), cloud, kernel, evaluate, True)
    assert info.died == 0 and kept.position[0, 0] == position[0, 0]
    new, _, info = smc.step(random.key(0), cloud, kernel, evaluate, False)
    assert np.isneginf(new.log_weight[0, 0]) and np.isfinite(new.log_weight[0, 1:]).all()
    assert info.died == 1 and new.position[0, 0] == position[0, 0]
    assert np.isfinite(new.gradient).all() and (new.position != position)[0, 1:].all()


def test_pull_back_of_weights_is_the_weighted_sum_of_scores():
    target = Target(jnp.array([0.3, -0.2]), jnp.array([0.4, 1.0]))
    position = random.normal(random.key(0), (2, 5, 2))
    weight = random.uniform(random.key(1), (2, 5))
    each, summed = smc.evaluate_model(potential, target, position, True)
    pooled, pull = smc.evaluate_model(potential, target, position, False)
    np.testing.assert_allclose(pull(weight), summed(weight), rtol=1e-5)
    np.testing.assert_allclose(each.gradient, pooled.gradient, rtol=1e-5)
    by_hand = jax.grad(
        lambda p: sum(
            weight[j, i] * potential(p, target.temperature[j], position[j, i])
            for j in range(2)
            for i in range(5)
        )
    )(target.params)
    np.testing.assert_allclose(summed(weight), by_hand, rtol=1e-5)
    slope = potential(0, 1.0, position[0, 0]) - potential(0, 0.0, position[0, 0])
    change = potential(target.params, 1.0, position[0, 0]) - potential(
        target.params, 0.0, position[0, 0]
    )
    assert slope != change
    np.testing.assert_allclose(each.slope[0, 0], change, rtol=1e-5)


def test_no_key_is_used_twice():
    with jax.debug_key_reuse(True):
        run_steps(random.key(0), FACTORS["dense"], 0.1, jnp.zeros(2), 0.5, 0.8, 0.5)


def test_momentum_carries_particles_as_far_as_the_dynamics_say():
    size, num_moves = 0.002, 32
    target = Target(jnp.zeros(0), jnp.ones(1))

    def bowl(params, temperature, x):
        return 0.5 * jnp.sum((x - 3.0) ** 2)

    def evaluate(x):
        return smc.evaluate_model(bowl, target, x, True)

    @jax.jit
    def wander(keys):
        position = 3.0 + random.normal(keys[0], (1, 20_000, 1))
        momentum = random.normal(keys[1], position.shape)
        cloud = smc.initial_cloud(position, momentum, evaluate(position)[0], jnp.zeros(()))
        memory = momentum_memory(jnp.array([size]))
        kernel = Kernel(jnp.array([size]), jnp.ones(1), jnp.zeros((1, 1)), memory)
        cloud, _ = lax.scan(
            lambda here, key: (smc.step(key, here, kernel, evaluate, True)[0], None),
            cloud,
            keys[2:],
        )
        return (position[0, :, 0] - 3.0) * (cloud.position[0, :, 0] - 3.0)

    product = wander(random.split(random.key(3), 2 + num_moves))
    # A spring with friction one: x'' + x' + x = 0, from x = 1 at rest on average.
    time, rate = num_moves * np.sqrt(2 * size), np.sqrt(0.75)
    left = np.exp(-time / 2) * (np.cos(rate * time) + np.sin(rate * time) / (2 * rate))
    assert left < 0.2  # without momentum it would be 0.94
    assert_mean(product, left, resolution=0.05)
