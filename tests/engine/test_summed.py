"""Second derivatives in the sums of coordinates, against dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import sparsity
from numpyro_jala.engine.banded import Band
from numpyro_jala.engine.summed import Summed

LENGTH, NUM_OTHERS = 25, 3
DIM = 2 * LENGTH + NUM_OTHERS


@pytest.fixture(scope="module")
def summed():
    """Two walks, whose steps lie mixed among coordinates that are not summed up."""
    places = np.random.default_rng(0).permutation(DIM)
    lanes = places[NUM_OTHERS:].reshape(2, LENGTH)
    return Summed((lanes,), Band(places, 1))


def energy(summed, steps):
    """The walks are seen, each in its own way at each time, and others tie to a start."""
    others = steps[summed.band.order[:NUM_OTHERS]]
    walks = jnp.cumsum(steps[summed.lanes[0]], -1)
    weights = jnp.linspace(0.5, 3.0, walks.size).reshape(walks.shape)
    tie = walks[0, 0] * others[-1] * 0.3
    return 0.5 * jnp.sum(steps**2) + jnp.sum(weights * (jnp.cosh(walks) + walks)) + tie


def test_a_factor_is_that_of_the_steps(summed):
    point = 0.3 * random.normal(random.key(0), (DIM,))
    dense = np.asarray(jax.jit(jax.hessian(lambda x: energy(summed, x)))(point), float)
    rows = random.normal(random.key(1), (2, 3, DIM))

    @jax.jit
    def use(point, rows):
        factor = summed.factorise(summed.hessian(lambda x: energy(summed, x), point))
        drawn = summed.solve_transposed(factor, rows)
        again = summed.multiply_transposed(factor, drawn)
        log_det = summed.log_diagonal(factor).sum()
        return log_det, drawn, again, sparsity.solve(summed, factor, rows[0, 0])

    log_det, drawn, again, solved = use(point, rows)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(dense)[1] / 2, rtol=1e-5)
    square = np.einsum("abi,ij,abj->ab", drawn, dense, drawn)
    np.testing.assert_allclose(square, (rows**2).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(again, rows, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(dense @ solved, rows[0, 0], rtol=1e-3, atol=1e-3)


def test_damping_is_that_of_the_sums(summed):
    point = 0.3 * random.normal(random.key(0), (DIM,))

    @jax.jit
    def log_determinant(point):
        matrix = summed.hessian(lambda x: energy(summed, x), point)
        return summed.log_diagonal(summed.factorise(matrix, 3.0)).sum()

    steps = np.asarray(jax.jit(jax.jacobian(summed.differences))(point), float)
    dense = np.asarray(jax.jit(jax.hessian(lambda x: energy(summed, x)))(point), float)
    in_sums = steps.T @ dense @ steps
    in_sums += 3.0 * np.diag(1e-6 + np.diag(in_sums))
    np.testing.assert_allclose(
        log_determinant(point), np.linalg.slogdet(in_sums)[1] / 2, rtol=1e-5
    )
