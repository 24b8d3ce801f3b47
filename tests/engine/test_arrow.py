"""Second derivatives and factors in the shape of an arrow, against dense linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import sparsity
from numpyro_jala.engine.arrow import Arrow

#: Rows of a table: a person, an item and, for some of them, the day of the person's visit.
RNG = np.random.default_rng(0)
PERSON, ITEM, DAY = (
    RNG.integers(30, size=90),
    RNG.integers(6, size=90),
    RNG.integers(4, size=90),
)
PERSON[:30], DAY[40:] = np.arange(30), -1
DIM = 40
MEMBERS = np.stack([PERSON, 30 + ITEM, np.where(DAY < 0, -1, 36 + DAY)], 1)
OWN = np.stack([np.arange(DIM), np.full(DIM, -1), np.full(DIM, -1)], 1)


def energy(x):
    """Return a term a row, which is not symmetric in its latents, and one a latent."""
    u, v, w = x[PERSON], x[30 + ITEM], jnp.where(DAY < 0, 0.3, x[36 + DAY])
    rows = jnp.exp(0.3 * u - 0.2 * v + 0.1 * w) + 0.1 * (v * w) ** 2
    return jnp.concatenate([rows, 0.5 * x**2 + 0.1 * jnp.cosh(x)])


@pytest.fixture
def arrow():
    order = np.concatenate([np.arange(30), np.arange(30, DIM)])
    return sparsity.find_arrow(np.concatenate([MEMBERS, OWN]), order)


def dense(arrow, parts):
    free, rest = arrow.free, arrow.rest
    matrix = np.zeros((DIM, DIM))
    matrix[free, free] = parts.diagonal
    matrix[np.ix_(free, rest)] = parts.border
    matrix[np.ix_(rest, free)] = parts.border.T
    matrix[np.ix_(rest, rest)] = parts.rest
    return matrix


def test_latents_of_one_colour_share_no_term(arrow):
    assert arrow.free.tolist() == list(range(30))  # the persons, who are most
    assert arrow.members.shape[1] == 3
    for column in arrow.members.T:
        for row, latent in enumerate(column[:90]):
            assert latent < 0 or latent in (PERSON[row], 30 + ITEM[row], 36 + DAY[row])
    assert np.sum(arrow.members >= 0) == np.sum(MEMBERS >= 0) + DIM


def test_terms_give_the_whole_second_derivative(arrow):
    x = random.normal(random.key(0), (DIM,))
    exact = jax.hessian(lambda x: energy(x).sum())(x)
    parts = jax.jit(lambda x: arrow.hessian(energy, x))(x)
    np.testing.assert_allclose(dense(arrow, parts), exact, rtol=1e-4, atol=1e-4)
    vector = np.random.default_rng(1).normal(size=DIM)
    product = arrow.multiply(jax.device_get(parts), vector)
    np.testing.assert_allclose(product, exact @ vector, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_a_factor_solves_multiplies_and_has_the_determinant(arrow, damping):
    x = random.normal(random.key(0), (DIM,))
    parts = arrow.hessian(energy, x)
    matrix = dense(arrow, parts)
    matrix += damping * np.diag(1e-6 + np.diag(matrix))
    factor = arrow.factorise(parts, damping)
    vector = random.normal(random.key(1), (DIM,))
    solved = sparsity.solve(arrow, factor, vector)
    np.testing.assert_allclose(matrix @ solved, vector, rtol=1e-3, atol=1e-4)
    log_det = arrow.log_diagonal(factor).sum()
    np.testing.assert_allclose(log_det, np.linalg.slogdet(matrix)[1] / 2, rtol=1e-5)
    rows = random.normal(random.key(2), (2, 3, DIM))
    drawn = arrow.solve_transposed(factor, rows)
    again = arrow.multiply_transposed(factor, drawn)
    np.testing.assert_allclose(again, rows, rtol=1e-3, atol=1e-4)
    # x = L⁻ᵀ z has the precision L Lᵀ: their squares are the same.
    square = np.einsum("abi,ij,abj->ab", drawn, matrix, drawn)
    np.testing.assert_allclose(square, (rows**2).sum(-1), rtol=1e-4)


@pytest.mark.parametrize("changed", [0, 35])  # a person and an item
def test_a_matrix_that_is_not_positive_definite_has_no_factor(arrow, changed):
    def lower(x):
        return energy(x).at[90 + changed].add(-100 * x[changed] ** 2)

    x = random.normal(random.key(0), (DIM,))
    assert bool(sparsity.is_finite(arrow.factorise(arrow.hessian(energy, x))))
    assert not bool(sparsity.is_finite(arrow.factorise(arrow.hessian(lower, x))))


def test_an_arrow_that_misses_a_tie_does_not_make_up_the_products(arrow):
    x = random.normal(random.key(0), (DIM,))
    exact = np.asarray(jax.hessian(lambda x: energy(x).sum())(x))
    product = (exact @ sparsity.band_probes(np.arange(DIM))[0])[None]
    parts = jax.device_get(arrow.hessian(energy, x[None][0]))
    points = jax.tree.map(lambda leaf: leaf[None], parts)
    assert sparsity.makes_up(arrow, points, product)
    cut = arrow.members.copy()
    cut[0, 1] = -1  # the first row's item
    less = Arrow(cut, DIM)
    points = jax.tree.map(lambda leaf: leaf[None], jax.device_get(less.hessian(energy, x)))
    assert not sparsity.makes_up(less, points, product)


def test_an_arrow_with_too_large_a_border_or_too_many_colours_is_none(monkeypatch):
    everybody = np.stack([np.arange(2_000), 2_000 + np.arange(2_000)], 1)
    monkeypatch.setattr(sparsity, "_MOST_WORK", 1e9)
    assert sparsity.find_arrow(everybody, np.arange(4_000)) is None
    few = np.stack([np.arange(2_000), 2_000 + np.arange(2_000) % 20], 1)
    assert sparsity.find_arrow(few, np.arange(2_020)).rest.size == 20
    clique = np.arange(9)[None]
    assert sparsity.find_arrow(clique, np.arange(9)) is None
