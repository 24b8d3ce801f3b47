import jax.numpy as jnp
import numpy as np

from numpyro_jala.engine import weights

LOG_WEIGHT = jnp.log(jnp.array([0.2, 0.1, 0.7, 1.0]))


def test_log_mean_exp_is_the_log_of_the_mean():
    np.testing.assert_allclose(weights.log_mean_exp(LOG_WEIGHT), np.log(0.5), rtol=1e-6)


def test_normalised_weights_are_shares():
    expected = [0.1, 0.05, 0.35, 0.5]
    np.testing.assert_allclose(weights.normalise(LOG_WEIGHT), expected, rtol=1e-6)


def test_effective_fraction_is_that_of_kish():
    shares = np.array([0.1, 0.05, 0.35, 0.5])
    expected = 1 / (4 * np.sum(shares**2))
    np.testing.assert_allclose(weights.effective_fraction(LOG_WEIGHT), expected, rtol=1e-5)
    one = jnp.array([0.0, -jnp.inf, -jnp.inf, -jnp.inf])
    np.testing.assert_allclose(weights.effective_fraction(one), 0.25)


def test_a_dead_island_has_weight_zero_and_no_nan():
    dead = jnp.full((2, 1, 4), -jnp.inf).at[0].set(LOG_WEIGHT)
    np.testing.assert_allclose(weights.normalise(dead).sum((1, 2)), [1, 0], rtol=1e-6)
    assert weights.effective_fraction(dead)[1, 0] == 0
    np.testing.assert_allclose(weights.pool(weights.normalise(dead)).sum(), 1, rtol=1e-6)


def test_conditional_fraction_by_hand():
    weight, increment = jnp.array([0.5, 0.25, 0.25]), jnp.array([1.0, 2.0, 4.0])
    expected = (0.5 + 0.5 + 1.0) ** 2 / (0.5 + 1.0 + 4.0)
    found = weights.conditional_fraction(weight, jnp.log(increment) + 80)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_living_islands_share_the_cloud_equally():
    log_weight = jnp.array([[0.0, 1.0], [2.0, -1.0], [-jnp.inf, -jnp.inf]])
    # Two components, of which the second lives in one island alone.
    other = jnp.full((3, 2), -jnp.inf).at[2, 1].set(-4.0)
    together = jnp.stack([log_weight, other], 1)
    pooled = weights.pool(weights.normalise(together))
    expected = [[0.5, 0.0], [0.5, 0.0], [0.0, 1.0]]
    np.testing.assert_allclose(pooled.sum(-1), expected, rtol=1e-6)
