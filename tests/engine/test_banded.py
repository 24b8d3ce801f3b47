"""Factors of matrices with a band, against dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import banded, sparsity
from numpyro_jala.engine.banded import Band


def random_precision(dim, width, seed=0):
    """Return a positive definite matrix with a band, which is not symmetric in its order."""
    rng = np.random.default_rng(seed)
    far = np.abs(np.subtract.outer(np.arange(dim), np.arange(dim)))
    matrix = np.where(far <= width, rng.normal(size=(dim, dim)), 0.0)
    matrix = matrix + matrix.T
    return matrix + np.diag(np.abs(matrix).sum(0) + rng.uniform(0.1, 1.0, dim))


CASES = [(50, 1), (50, 7), (49, 20), (12, 12), (65, 16)]


def make(dim, width):
    order = np.random.default_rng(1).permutation(dim)
    band = Band(order, width)
    matrix = np.zeros((dim, dim))
    matrix[np.ix_(order, order)] = random_precision(dim, width)
    return band, matrix, factorised(band, matrix)


def factorised(band, matrix):
    factorise = jax.jit(lambda products: band.factorise(band.assemble(products)))
    return factorise(jnp.asarray(band.probes @ matrix, jnp.float32))


@pytest.mark.parametrize("dim, width", CASES)
def test_a_factor_solves_multiplies_and_has_the_determinant(dim, width):
    band, matrix, factor = make(dim, width)
    assert (band.num_blocks == 1) == (2 * max(width, 16) >= dim)
    vector = np.random.default_rng(2).normal(size=dim).astype(np.float32)
    rows = jnp.asarray(np.random.default_rng(3).normal(size=(2, 3, dim)), jnp.float32)

    @jax.jit
    def use(factor, vector, rows):
        drawn = band.solve_transposed(factor, rows)
        again = band.multiply_transposed(factor, drawn)
        log_det = band.log_diagonal(factor).sum()
        return sparsity.solve(band, factor, vector), log_det, drawn, again

    solved, log_det, drawn, again = use(factor, vector, rows)
    np.testing.assert_allclose(matrix @ solved, vector, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1] / 2, rtol=1e-5)
    np.testing.assert_allclose(again, rows, rtol=1e-3, atol=1e-4)
    # x = L⁻ᵀ z has the precision L Lᵀ: their squares are the same.
    square = np.einsum("abi,ij,abj->ab", drawn, matrix, drawn)
    np.testing.assert_allclose(square, (rows**2).sum(-1), rtol=1e-4)


@pytest.mark.parametrize("dim, width", CASES)
def test_probes_show_the_whole_second_derivative(dim, width):
    order = np.random.default_rng(1).permutation(dim)
    band, place = Band(order, width), np.argsort(order)
    near = np.abs(np.subtract.outer(place, place)) <= width
    ties = jnp.asarray(np.where(near, np.random.default_rng(0).random((dim, dim)), 0.0))

    def function(x):
        return jnp.sum(ties * jnp.sin(x[:, None] + 2 * x)) + jnp.sum(x**4)

    x = random.normal(random.key(0), (dim,))
    assert len(band.probes) <= min(2 * width + 1, dim)
    diagonal, below = jax.jit(lambda x: band.hessian(function, x))(x)
    exact = np.asarray(jax.jit(jax.hessian(function))(x))[np.ix_(order, order)]
    size, count = band.block, band.num_blocks
    padded = np.eye(size * count)
    padded[:dim, :dim] = exact
    blocks = padded.reshape(count, size, count, size).swapaxes(1, 2)
    index = np.arange(count)
    np.testing.assert_allclose(diagonal, blocks[index, index], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        below[1:], blocks[index[1:], index[:-1]], rtol=1e-4, atol=1e-4
    )


def test_the_inverse_of_a_cholesky_factor_has_the_right_derivatives():
    matrix = jnp.asarray(random_precision(6, 6), jnp.float32)
    change = jnp.asarray(random_precision(6, 6, seed=5), jnp.float32)

    def plain(t):
        return jnp.linalg.inv(jnp.linalg.cholesky(matrix + t * change))

    def ours(t):
        return banded.inverse_cholesky(matrix + t * change)

    np.testing.assert_allclose(ours(0.0), plain(0.0), rtol=1e-4, atol=1e-5)
    for derivative in (jax.jacfwd, jax.jacrev, lambda f: jax.jacfwd(jax.jacfwd(f))):
        found, exact = (jax.jit(derivative(each))(0.1) for each in (ours, plain))
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-4)


def test_a_matrix_that_is_not_positive_definite_has_no_factor():
    band = Band(np.arange(40), 1)
    matrix = random_precision(40, 1)
    matrix[20, 20] = -1.0
    factor = factorised(band, matrix)
    assert not bool(jnp.isfinite(factor.inverse).all())
