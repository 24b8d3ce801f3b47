"""Small linear algebra in batches.

jaxlib spreads a batch of factorisations over a pool of threads, where two batches at a
time can wait for each other for ever, and calls LAPACK for each matrix. So a few large
matrices are factorised one after the other, and many small ones by loops over their
columns that run over the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular

from numpyro_jala._typing import Array
from numpyro_jala.backend.sharding import locally

#: Batches of more matrices than this go column by column, if they are not larger than that.
_MANY, _SMALL = 64, 8
#: Matrices up to this size are written out without a loop.
_TINY = 3


def by_matrix(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to the entries along two leading axes.

    On a CPU one after the other.
    """

    def in_turn(*entries: Any) -> Any:
        shape = jax.tree.leaves(entries)[0].shape[:2]
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), entries)
        found = lax.map(lambda entry: fn(*entry), flat)
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), found)

    def each(*entries: Any) -> Any:
        return lax.platform_dependent(*entries, cpu=in_turn, default=jax.vmap(jax.vmap(fn)))

    return locally(each, *arrays)


def _is_many(matrix: Array) -> bool:
    return math.prod(matrix.shape[:-2]) > _MANY and matrix.shape[-1] <= _SMALL


def _loop(size: int, body: Callable[[Any, Array], Array], start: Array) -> Array:
    if size > _TINY:
        return lax.fori_loop(0, size, body, start)
    for i in range(size):
        start = body(i, start)
    return start


def cholesky(matrix: Array) -> Array:
    """Return lower Cholesky factors (islands, components, size, size).

    Not finite where a matrix is not positive definite.
    """
    if not _is_many(matrix):
        return by_matrix(jnp.linalg.cholesky, matrix)
    size = matrix.shape[-1]
    rows = jnp.arange(size)

    def column(j: Any, factor: Array) -> Array:
        row = jnp.take(factor, j, axis=-2)
        rest = jnp.take(matrix, j, axis=-1) - jnp.sum(factor * row[..., None, :], -1)
        pivot = jnp.take(rest, j, axis=-1)[..., None]
        # A pivot that is not positive gives NaN, as LAPACK does here.
        entries = jnp.where(rows >= j, rest / jnp.sqrt(pivot), 0.0)
        return jnp.where(rows == j, entries[..., None], factor)

    return _loop(size, column, jnp.zeros_like(matrix))


def solve_lower(factor: Array, right: Array, transposed: bool = False) -> Array:
    """Solve triangular systems L x = b, or Lᵀ x = b, for columns (..., size, columns)."""
    if not _is_many(factor):

        def solve(lower: Array, columns: Array) -> Array:
            trans = 1 if transposed else 0
            return solve_triangular(lower, columns, lower=True, trans=trans)

        return by_matrix(solve, factor, right)
    size = factor.shape[-1]
    rows = jnp.arange(size)
    matrix = jnp.swapaxes(factor, -1, -2) if transposed else factor

    def substitute(i: Any, solved: Array) -> Array:
        k = size - 1 - i if transposed else i
        row = jnp.take(matrix, k, axis=-2)
        known = jnp.sum(row[..., None] * solved, -2)
        diagonal = jnp.take(row, k, axis=-1)[..., None]
        value = (jnp.take(right, k, axis=-2) - known) / diagonal
        return jnp.where(rows[:, None] == k, value[..., None, :], solved)

    return _loop(size, substitute, jnp.zeros_like(right))


def solve_positive(matrix: Array, right: Array) -> Array:
    """Solve systems with positive definite matrices."""
    if not _is_many(matrix):
        return by_matrix(lambda a, b: cho_solve(cho_factor(a), b), matrix, right)
    factor = cholesky(matrix)
    return solve_lower(factor, solve_lower(factor, right), transposed=True)


def solve(matrix: Array, right: Array) -> Array:
    """Solve systems with symmetric matrices that rounding may have made indefinite."""
    if not _is_many(matrix):
        return by_matrix(jnp.linalg.solve, matrix, right)
    return solve_positive(matrix, right)


def multiply(matrix: Array, rows: Array) -> Array:
    """Multiply each row (..., num_rows, size) by its component's matrix."""
    if rows.shape[-3] == 1 or rows.shape[-1] > 8:
        return rows @ jnp.swapaxes(matrix, -1, -2)
    return jnp.sum(matrix[..., None, :, :] * rows[..., None, :], -1)
