r"""A factor of a precision matrix with a band.

Latents that lie in an order along which only near ones depend on each other have a
precision :math:`P`, the second derivative of their potential, with a band. In blocks as
wide as the band it is block tridiagonal, and so is its Cholesky factor :math:`P = L L^\top`
block bidiagonal: a loop over the blocks finds it at a cost linear in their number. A dense
matrix is the case of one block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from numpyro_jala._typing import Array

#: Blocks of at least this size: a few products of matrices are quicker than many of numbers.
_LEAST_BLOCK = 16
#: Products with the matrix that are found at a time.
_AT_ONCE = 64


#: The terms that make up a potential, in an array of any shape, at a position.
Energy: TypeAlias = Callable[[Array], Array]


def total_energy(energy: Energy, position: Array) -> Array:
    """Return the potential that the terms make up."""
    return jnp.sum(energy(position))


class Blocks(NamedTuple):
    """The blocks of a symmetric matrix on the diagonal, and those left of them."""

    diagonal: Array  # (num_blocks, block, block)
    below: Array  # (num_blocks, block, block)


class BandFactor(NamedTuple):
    """The factor L of a precision, such that its inverse transposed is quick to apply.

    inverse
        Of the blocks on the diagonal of L.
    link
        How a block of a solution depends on the next one.
    """

    inverse: Array  # (num_blocks, block, block)
    link: Array  # (num_blocks, block, block)


@dataclass(frozen=True, eq=False)
class Band:
    """Where a symmetric matrix may have entries.

    order
        The coordinates in an order that keeps the band small.
    width
        Entries further from the diagonal than this are zero, in that order.
    """

    order: np.ndarray  # (dim,)
    width: int

    @property
    def dim(self) -> int:
        """Rows of the matrix."""
        return self.order.size

    @cached_property
    def block(self) -> int:
        """Rows of a block: all if the matrix is dense."""
        size = max(self.width, _LEAST_BLOCK)
        return self.dim if 2 * size >= self.dim else size

    @cached_property
    def num_blocks(self) -> int:
        """How many blocks there are; the last one is padded."""
        return -(-self.dim // self.block)

    @cached_property
    def place(self) -> np.ndarray:
        """Where each coordinate stands in the order, (dim,)."""
        return np.argsort(self.order)

    @cached_property
    def probes(self) -> np.ndarray:
        """Vectors whose products with the matrix show all its entries, (probes, dim).

        A probe has ones so far apart that no row of the band sees two of them.
        """
        num = min(2 * self.width + 1, self.dim)
        return (np.arange(num)[:, None] == self.place % num).astype(np.float32)

    @cached_property
    def _entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Which product and row hold each entry of the blocks on and below the diagonal.

        Two arrays of flat indices (num_blocks, block, block), -1 where there is none.
        """
        num, size = len(self.probes), self.block
        rows = np.arange(self.num_blocks * size).reshape(-1, size, 1)

        def index(columns: np.ndarray) -> np.ndarray:
            inside = (np.maximum(rows, columns) < self.dim) & (columns >= 0)
            inside &= np.abs(rows - columns) <= self.width
            source = self.order[np.minimum(rows, self.dim - 1)]
            return np.where(inside, columns % num * self.dim + source, -1)

        columns = np.swapaxes(rows, 1, 2)
        return index(columns), index(columns - size)

    def assemble(self, products: Array) -> Blocks:
        """Return the blocks on the diagonal and those left of them, from the products.

        The padding is the identity.
        """
        padded = jnp.append(products.ravel(), jnp.zeros((), products.dtype))
        diagonal, below = (padded[index] for index in self._entries)
        num_padded = self.num_blocks * self.block - self.dim
        ones = np.zeros((self.num_blocks, self.block), products.dtype)
        ones[-1, self.block - num_padded :] = 1.0
        eye = ones[:, None] * np.eye(self.block, dtype=ones.dtype)
        return Blocks(symmetric(diagonal) + eye, below)

    def split(self, rows: Array) -> Array:
        """Part vectors (..., dim) into blocks (num_blocks, ..., block), padded by zeros."""
        ordered = rows[..., self.order]
        missing = self.num_blocks * self.block - self.dim
        widths = [(0, 0)] * (rows.ndim - 1) + [(0, missing)]
        padded = jnp.pad(ordered, widths)
        return jnp.moveaxis(padded.reshape(*rows.shape[:-1], -1, self.block), -2, 0)

    def join(self, blocks: Array) -> Array:
        """Undo :meth:`split`."""
        rows = jnp.moveaxis(blocks, 0, -2)
        return rows.reshape(*rows.shape[:-2], -1)[..., self.place]

    @property
    def cost(self) -> int:
        """How many evaluations a second derivative costs, about."""
        return len(self.probes)

    def hessian(self, energy: Energy, position: Array) -> Blocks:
        """Return the blocks of the second derivative of a sum of energies."""
        total, probes = partial(total_energy, energy), jnp.asarray(self.probes)
        return self.assemble(products(total, position, probes))

    def factorise(self, matrix: Blocks, damping: Array | float = 0.0) -> BandFactor:
        """Factorise a precision; not finite unless it is positive definite.

        Parameters
        ----------
        damping
            What is added to the diagonal, in units of it.
        """

        def one(last: Array, blocks: Blocks) -> tuple[Array, tuple[Array, Array]]:
            own, left = blocks
            left = left @ last.T
            inverse = inverse_cholesky(own - left @ left.T)
            return inverse, (inverse, left)

        diagonal, below = matrix
        own = jnp.diagonal(diagonal, axis1=-2, axis2=-1)
        eye = jnp.eye(self.block, dtype=own.dtype)
        diagonal = diagonal + damped(own, damping)[..., None] * eye
        if len(diagonal) == 1:
            inverse = inverse_cholesky(diagonal[0])[None]
            return BandFactor(inverse, jnp.zeros_like(inverse))
        first = jnp.zeros_like(diagonal[0])
        inverse, left = lax.scan(one, first, Blocks(diagonal, below))[1]
        following = jnp.roll(left, -1, 0).at[-1].set(0.0)
        return BandFactor(inverse, jnp.swapaxes(following @ inverse, -1, -2))

    def solve_transposed(self, factor: BandFactor, rows: Array) -> Array:
        """Return :math:`L^{-T} z`: of standard normal rows, draws of that precision."""
        blocks = self.split(rows)
        own = jax.vmap(jnp.matmul)(blocks, factor.inverse)
        if len(own) == 1:
            return self.join(own)

        def one(following: Array, block: tuple[Array, Array]) -> tuple[Array, Array]:
            value = block[0] - following @ block[1].T
            return value, value

        first = jnp.zeros_like(own[0])
        solved = lax.scan(one, first, (own, factor.link), reverse=True)[1]
        return self.join(solved)

    def multiply_transposed(self, factor: BandFactor, rows: Array) -> Array:
        r"""Return :math:`L^\top x`, the inverse of :meth:`solve_transposed`."""
        blocks = self.split(rows)
        following = jnp.roll(blocks, -1, 0).at[-1].set(0.0)
        own = blocks + jax.vmap(lambda rest, link: rest @ link.T)(following, factor.link)

        def one(inverse: Array, block: Array) -> Array:
            flat = block.reshape(-1, block.shape[-1])
            solved = solve_triangular(inverse, flat.T, lower=True, trans=1)
            return solved.T.reshape(block.shape)

        return self.join(lax.map(lambda pair: one(*pair), (factor.inverse, own)))

    def log_diagonal(self, factor: BandFactor) -> Array:
        """Return the logarithm of each coordinate's entry on the diagonal of L, (dim,)."""
        diagonal = jnp.diagonal(factor.inverse, axis1=-2, axis2=-1)
        return -jnp.log(diagonal.ravel()[: self.dim])[self.place]


def symmetric(matrix: Array) -> Array:
    """Take away what rounding has made of a symmetric matrix."""
    return (matrix + jnp.swapaxes(matrix, -1, -2)) / 2


def damped(diagonal: Array, damping: Array | float) -> Array:
    """Return what a damping adds to a diagonal."""
    return damping * (1e-6 + jnp.abs(diagonal))


@jax.custom_jvp
def inverse_cholesky(matrix: Array) -> Array:
    """Return the inverse of a Cholesky factor; not finite where there is none."""
    eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    return solve_triangular(jnp.linalg.cholesky(matrix), eye, lower=True)


@inverse_cholesky.defjvp
def _inverse_cholesky_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """Differentiate by products alone: JAX's own rule solves two more systems."""
    inverse = inverse_cholesky(*primals)
    size = inverse.shape[-1]
    half = np.tril(np.ones((size, size)), -1) + 0.5 * np.eye(size)
    change = inverse @ symmetric(tangents[0]) @ inverse.T
    return inverse, -(change * half.astype(inverse.dtype)) @ inverse


def products(
    function: Callable[[Array], Array], position: Array, directions: Array
) -> Array:
    """Return the products of the second derivative with some directions (rows)."""
    # Else a compiler takes seconds to find out what a model makes of known directions.
    directions = jnp.asarray(directions, position.dtype)
    directions = lax.optimization_barrier(directions)  # type: ignore[no-untyped-call]

    def one(direction: Array) -> Array:
        return jax.jvp(jax.grad(function), (position,), (direction,))[1]

    if len(directions) <= _AT_ONCE:
        return jax.vmap(one)(directions)
    return lax.map(one, directions, batch_size=_AT_ONCE)
