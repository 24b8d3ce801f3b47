"""The Student t against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_jala.engine import student


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_radius_is_a_quantile_of_chi_squared(dtype):
    tail = np.concatenate([np.geomspace(1e-7, 0.5, 60), 1 - np.geomspace(1e-6, 0.4, 60)])
    with jax.enable_x64(dtype is np.float64):
        found = student.radius(jnp.asarray(tail, dtype))
        expected = np.sqrt(4 / stats.chi2(4).isf(tail.astype(dtype).astype(float)))
        # Near one a float does not know the tail, nor the radius, which is large there.
        tolerance = 1e-8 if dtype is np.float64 else 2e-4
        known = slice(None) if dtype is np.float64 else tail < 0.999
        np.testing.assert_allclose(found[known], expected[known], rtol=tolerance)


@pytest.mark.parametrize("dim", [1, 3, 12])
def test_the_density_is_that_of_a_multivariate_t(dim):
    rng = np.random.default_rng(dim)
    factor = np.tril(rng.normal(size=(dim, dim)), -1) + np.diag(rng.uniform(0.3, 2, dim))
    noise = 2 * rng.normal(size=(20, dim))
    found = student.log_density(
        jnp.asarray((noise**2).sum(1)), dim, np.log(np.diag(factor)).sum()
    )
    exact = stats.multivariate_t(np.zeros(dim), factor @ factor.T, 4)
    np.testing.assert_allclose(found, exact.logpdf(noise @ factor.T), rtol=1e-5, atol=1e-5)
