"""Few large matrices one after the other, many small ones together: the same algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_jala.engine import linalg

#: (islands, components, size): written out, in a loop over columns, and one by one.
SHAPES = [(5, 40, 1), (5, 40, 3), (5, 40, 4), (5, 40, 8), (5, 40, 9), (2, 3, 2), (2, 1, 12)]


@pytest.fixture(params=SHAPES, ids=str)
def matrices(request):
    """Well conditioned ones, their factors, and some right hand sides, in float64."""
    *leading, size = request.param
    rng = np.random.default_rng(0)
    root = rng.normal(size=(*leading, size, size)) / size**0.5
    matrix = root @ np.swapaxes(root, -1, -2) + 0.5 * np.eye(size)
    return matrix, np.linalg.cholesky(matrix), rng.normal(size=(*leading, size, 3))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_some_are_many_and_some_are_few():
    found = [linalg._is_many(np.zeros((*shape, shape[-1]))) for shape in SHAPES]
    assert found == [True, True, True, True, False, False, False]


def test_a_cholesky_factor_is_that_of_lapack(matrices):
    matrix, factor, _ = matrices
    found = linalg.cholesky(jnp.asarray(matrix))
    assert np.array_equal(found, np.tril(found))
    close(found, factor)
    close(jax.jit(linalg.cholesky)(jnp.asarray(matrix)), factor)


def test_triangles_are_solved(matrices):
    _, factor, right = matrices
    given = jnp.asarray(factor), jnp.asarray(right)
    close(linalg.solve_lower(*given), np.linalg.solve(factor, right))
    turned = np.swapaxes(factor, -1, -2)
    close(linalg.solve_lower(*given, transposed=True), np.linalg.solve(turned, right))


@pytest.mark.parametrize("solve", [linalg.solve_positive, linalg.solve])
def test_positive_systems_are_solved(matrices, solve):
    matrix, _, right = matrices
    found = solve(jnp.asarray(matrix), jnp.asarray(right))
    close(found, np.linalg.solve(matrix, right))


def test_a_matrix_that_is_not_positive_has_no_factor_and_harms_no_other(matrices):
    matrix, factor, right = (jnp.asarray(values) for values in matrices)
    # Positive but in its last coordinate.
    broken = matrix.at[1, 0, -1, -1].set(-1.0)
    found = linalg.cholesky(broken)
    assert not np.isfinite(found[1, 0]).all()
    others = np.ones(matrix.shape[:2], bool)
    others[1, 0] = False
    close(found[others], factor[others])
    solved = linalg.solve_positive(broken, right)
    assert not np.isfinite(solved[1, 0]).all()
    close(solved[others], np.linalg.solve(matrices[0], matrices[2])[others])


def test_rows_are_multiplied_by_the_matrix_of_their_component(matrices):
    matrix, *_ = matrices
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=matrix.shape)  # not symmetric
    rows = rng.normal(size=(*matrix.shape[:2], 6, matrix.shape[-1]))
    found = linalg.multiply(jnp.asarray(matrix), jnp.asarray(rows))
    close(found, np.einsum("jcde,jcne->jcnd", matrix, rows))
    alone = linalg.multiply(jnp.asarray(matrix[0]), jnp.asarray(rows[0]))
    close(alone, np.einsum("cde,cne->cnd", matrix[0], rows[0]))
    # One matrix for all islands.
    common = linalg.multiply(jnp.asarray(matrix[:1]), jnp.asarray(rows))
    close(common, np.einsum("cde,jcne->jcnd", matrix[0], rows))
