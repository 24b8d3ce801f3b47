import arviz as az
import numpy as np
import pytest

from numpyro_jala.inference import pareto


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.9])
def test_the_shape_of_a_pareto_tail_is_found(shape):
    uniform = np.random.default_rng(0).uniform(size=200_000)
    found = pareto.shape(-shape * np.log(uniform) - 300.0)
    # Of 1,342 weights in the tail; the variance of k is (1 + k)^2 over their number.
    assert abs(found - shape) < 3.9 * (1 + shape) / 1342**0.5


def test_the_shape_does_not_depend_on_the_scale_of_weights():
    log_weight = np.random.default_rng(1).normal(size=4_000)
    found = pareto.shape(log_weight)
    np.testing.assert_allclose(found, pareto.shape(log_weight + 1e4), rtol=1e-6)


@pytest.mark.skipif(not hasattr(az, "psislw"), reason="another ArviZ")
@pytest.mark.parametrize("size", [100, 4_000])
def test_the_shape_is_that_of_arviz(size):
    log_weight = 2 * np.random.default_rng(2).normal(size=size)
    np.testing.assert_allclose(
        pareto.shape(log_weight), az.psislw(log_weight)[1], rtol=1e-6
    )


def test_few_or_equal_weights_have_no_tail():
    assert np.isnan(pareto.shape(np.zeros(20)))
    assert pareto.shape(np.zeros(100)) == -np.inf
    assert np.isnan(pareto.shape(np.full(100, -np.inf)))
