import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import adaptation, tempering, transport
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.partition import joint
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.weights import conditional_fraction, normalise


def test_an_island_heats_as_the_others_say():
    weight = normalise(random.normal(random.key(0), (4, 2, 50)))
    slope = random.normal(random.key(2), (4, 2, 50))
    hold, rest, near = jnp.asarray(False), jnp.zeros((4, 2, 50)), jnp.zeros((4, 2))
    now = jnp.full((4, 2), 0.1)
    first = tempering.next_temperature(now, weight, 1e3 * slope, rest, near, hold)
    other = tempering.next_temperature(
        now, weight, 1e3 * slope.at[1, 0].multiply(9), rest, near, hold
    )
    assert first[1, 0] == other[1, 0] and first[0, 0] != other[0, 0]
    # Nor does a component depend on another.
    np.testing.assert_array_equal(first[:, 1], other[:, 1])


def test_the_step_size_shrinks_where_weights_vary_and_grows_where_not():
    log_h = jnp.log(jnp.full(3, 0.1))
    vote = adaptation.adapt_step_size(log_h, jnp.array([1.0, 0.1, 1e-4]), 0.1)
    assert vote[0] < vote[1] < vote[2]
    np.testing.assert_allclose(vote[1], np.log(0.1), rtol=1e-6)


def test_the_variance_of_normal_increments_is_found_from_weights_and_from_tests():
    scale = jnp.array([[0.2], [0.9]])
    weight = normalise(random.normal(random.key(1), (2, 20_000)))
    noise = random.normal(random.key(0), (2, 20_000))
    # At a fixed target the increments of a small move have mean minus half the variance.
    increment = scale * noise - 0.5 * scale**2
    for found in (adaptation.weight_variance, adaptation.refusal_variance):
        np.testing.assert_allclose(found(weight, increment), scale[:, 0] ** 2, rtol=0.1)
    never = jnp.full((2, 20_000), -jnp.inf)
    assert np.isfinite(adaptation.refusal_variance(weight, never)).all()


def test_a_gaussian_bears_its_step_size():
    dim, num = 20, 4_000
    h = adaptation.gaussian_step_size(np.array([dim, 1]))[0]
    before = random.normal(random.key(0), (num, dim))
    noise = random.normal(random.key(1), (num, dim))
    after = (1 - h) * before + jnp.sqrt(2 * h) * noise
    increment = h / 4 * (jnp.sum(before**2, -1) - jnp.sum(after**2, -1))
    variance = float(jnp.var(increment))
    assert 0.5 * adaptation.MOVE_VARIANCE < variance < 1.5 * adaptation.MOVE_VARIANCE


@pytest.mark.parametrize("scale", [1.0, 1.15, 1.35, 1.5, 1e6, 1e-3])
def test_an_increment_of_the_temperature_costs_what_it_may(scale):
    # Two components, each with an increment of its own.
    scales = scale * jnp.array([1.0, 7.0])[:, None]
    slope = scales * random.normal(random.key(0), (1, 2, 5_000)) ** 2
    weight = jnp.full((1, 2, 5_000), 1 / 5_000)
    found = jnp.exp(tempering.longest_increment(weight, slope, 0 * slope))
    left = conditional_fraction(weight, -found[..., None] * slope)
    for component in range(2):
        cost = float(1 - left[0, component])
        assert cost <= tempering.DROP + 1e-6
        assert cost > tempering.DROP / 4 or found[0, component] == 1.0


def test_an_island_goes_as_far_as_the_others_on_average_could():
    weight = jnp.full((3, 2, 400), 1 / 400)
    scale = jnp.array([[10.0, 30.0], [20.0, 200.0], [50.0, 40.0]])[..., None]
    slope, rest = scale * random.normal(random.key(0), (3, 2, 400)), jnp.zeros((3, 2, 400))
    wish = tempering.longest_increment(weight, slope, rest)
    now = jnp.array([[0.1, 0.3], [0.2, 0.2], [0.3, 0.1]])
    near = jnp.zeros((3, 2))
    found = tempering.next_temperature(now, weight, slope, rest, near, jnp.asarray(False))
    far = [np.exp((wish[1] + wish[2]) / 2), np.exp((wish[0] + wish[2]) / 2)]
    np.testing.assert_allclose(found[:2] - now[:2], far, rtol=1e-4)
    held = tempering.next_temperature(now, weight, slope, rest, near, jnp.asarray(True))
    np.testing.assert_array_equal(held, now)


def test_temperatures_rise_until_all_have_arrived():
    weight, slope = jnp.full((2, 3, 50), 1 / 50), jnp.zeros((2, 3, 50))
    # A component that is at zero does not wait, and none goes beyond one.
    now = jnp.array([[1.0, 0.4, 0.0], [1.0, 0.4, 0.0]])
    near = jnp.zeros((2, 3))
    held = tempering.next_temperature(now, weight, slope, slope, near, jnp.asarray(True))
    np.testing.assert_allclose(held, [[1.0, 0.4, 1.0]] * 2)
    free = tempering.next_temperature(now, weight, slope, slope, near, jnp.asarray(False))
    np.testing.assert_allclose(free, 1.0)


def test_particles_follow_a_rise_of_the_temperature_not_too_far():
    weight, nothing = jnp.full((2, 3, 50), 1 / 50), jnp.zeros((2, 3, 50))
    now = jnp.full((2, 3), 0.2)
    reach = jnp.array([[0.0, 4.0, 0.3], [0.0, 20.0, 2.0]])
    found = tempering.next_temperature(
        now, weight, nothing, nothing, reach, jnp.asarray(False)
    )
    rise = np.minimum(
        tempering.FARTHEST / np.array([[1e-9, 4.0, 0.3], [1e-9, 20.0, 2.0]]), 0.8
    )
    np.testing.assert_allclose(found - now, rise, rtol=1e-5)


def test_weights_fall_where_the_slope_is_large():
    slope = random.normal(random.key(0), (1, 1, 5_000)) ** 4
    weight = jnp.full((1, 1, 5_000), 1 / 5_000)
    bounded = tempering.longest_increment(weight, slope, 0 * slope)
    explosive = tempering.longest_increment(weight, -slope, 0 * slope)
    assert bounded > explosive


def test_parameters_may_pay_for_the_temperature():
    slope = 1e3 * random.normal(random.key(0), (1, 1, 2_000))
    weight = jnp.full((1, 1, 2_000), 1 / 2_000)
    alone = tempering.longest_increment(weight, slope, 0 * slope)
    helped = tempering.longest_increment(weight, slope, -0.01 * slope)
    assert helped > alone


def gaussian_cloud(factor):
    """A Gaussian whose mean moves by `drift` and whose precision is known."""
    precision = jnp.linalg.inv(factor @ factor.T)
    mean, drift = jnp.array([3.0, -1.0, 0.5]), jnp.array([0.5, 2.0, -1.0])
    position = mean + random.normal(random.key(5), (4, 200, 3)) @ factor.T
    gradient = (position - mean) @ precision
    rate = -(position - mean) @ precision @ drift + 0.7
    zero = jnp.zeros((4, 1, 200))
    columns = zero, zero, gradient, zero, zero[..., None]
    cloud = Cloud(position, position, *columns, jnp.zeros((4, 1)))
    return cloud, rate[:, None, :, None], drift


ALL = joint(3)
DIAGONAL = Factor((jnp.ones((4, 1, 3)),))


def test_following_a_gaussian_is_free_and_keeps_the_mean_of_the_rate():
    factor = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.3, 0.2, 0.4]])
    cloud, rate, drift = gaussian_cloud(factor)
    weight = normalise(cloud.log_weight)
    # Each island has a factor of its own, from what the rest look like.
    factors = factor * jnp.array([1.0, 0.7, 1.6, 1.2])[:, None, None]
    factors = factors.at[2, 1, 0].add(0.4)
    last, blocks = jnp.zeros((4, 1, 3)), Factor((factors[:, None],))
    found = transport.learn(weight, cloud, rate, blocks, ALL, last, 0.0)
    np.testing.assert_allclose(found.shift[:, 0], jnp.tile(-drift, (4, 1)), rtol=1e-2)
    assert float(jnp.var(found.rate)) < 1e-4 * float(jnp.var(rate))
    np.testing.assert_allclose(found.rate.mean(), 0.7, atol=1e-3)


def test_without_a_regression_the_mean_moves_by_the_covariance():
    factor = jnp.diag(jnp.array([1.0, 0.5, 2.0]))
    cloud, rate, drift = gaussian_cloud(factor)
    weight = normalise(cloud.log_weight)

    def learn(last, memory):
        return transport.learn(weight, cloud, rate, DIAGONAL, ALL, last, memory)

    found = learn(jnp.zeros((4, 1, 3)), 0.0)
    np.testing.assert_allclose(found.learned[:, 0], jnp.tile(-drift, (4, 1)), atol=0.9)
    assert float(jnp.var(found.rate)) < 0.2 * float(jnp.var(rate))
    kept = learn(found.learned, 0.75)
    np.testing.assert_allclose(kept.learned, found.learned, rtol=1e-4)
    half = learn(0 * found.learned, 0.75)
    np.testing.assert_allclose(half.learned, 0.25 * found.learned, rtol=1e-4)


def test_a_shift_that_costs_more_than_it_saves_is_not_taken():
    cloud, _, _ = gaussian_cloud(jnp.eye(3))
    noise = random.normal(random.key(9), (4, 1, 200, 1))
    weight = normalise(cloud.log_weight)
    wrong = jnp.full((4, 1, 3), 5.0)
    found = transport.learn(weight, cloud, noise, DIAGONAL, ALL, wrong, 1.0)
    assert (found.shift == 0).all()
    np.testing.assert_array_equal(found.rate, noise)


def test_a_tested_step_is_longer_the_longer_the_steps_are():
    sizes = jnp.array([1e-6, 0.001, 0.004, 0.016, 0.6])
    np.testing.assert_allclose(
        adaptation.tested_multiplier(sizes), [0.5, 0.5, 1.0, 2.0, 2.0], rtol=1e-5
    )


def test_rounding_of_large_potentials_is_not_taken_for_too_long_a_step():
    exact = 1e6 + np.random.default_rng(0).gamma(2.0, 20.0, size=(2, 4, 500))
    rounded = exact.astype(np.float32)
    error = (rounded - exact)[0] - (rounded - exact)[1]
    weight = jnp.full((4, 500), 1 / 500)
    allowed = adaptation.rounding_variance(weight, jnp.asarray(rounded[0]))
    # A sum of many terms is off by more than the rounding of its last digit.
    assert (allowed > error.var(-1)).all() and (
        allowed < adaptation.MOVE_VARIANCE * 2.0**3
    ).all()
    assert (
        adaptation.rounding_variance(weight, jnp.asarray(rounded[0] / 1e4)) < 1e-6
    ).all()
