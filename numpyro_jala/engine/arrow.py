r"""A factor of a precision matrix in the shape of an arrow.

In crossed effects no two persons share a term of the log-density, nor do two items. Given
the items the persons are independent: their part of the precision is a diagonal, and it is
their ties to the items, and these among themselves, that fill a border. With the diagonal
:math:`D`, the border :math:`C` and the rest :math:`B`,

.. math::
    P = \begin{pmatrix} D & C \\ C^\top & B \end{pmatrix} = L L^\top, \quad
    L = \begin{pmatrix} D^{1/2} & 0 \\ C^\top D^{-1/2} & R \end{pmatrix}, \quad
    R R^\top = B - C^\top D^{-1} C .

The second derivative is found term by term. Latents have colours such that no term depends
on two of the same: to move all of one colour and all of another gives each term its own
mixed derivative, in one evaluation for each pair of colours, however many latents there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_jala._typing import Array
from numpyro_jala.engine.banded import Energy, damped, inverse_cholesky


class Parts(NamedTuple):
    """The parts of a symmetric matrix in the shape of an arrow."""

    diagonal: Array  # (num_free,)
    border: Array  # (num_free, num_rest)
    rest: Array  # (num_rest, num_rest)


class ArrowFactor(NamedTuple):
    """The factor L of a precision.

    root
        Of the diagonal.
    border
        Divided by the root.
    inverse
        Of the factor R of what the border leaves of the rest.
    """

    root: Array  # (num_free,)
    border: Array  # (num_free, num_rest)
    inverse: Array  # (num_rest, num_rest)


class _Entries(NamedTuple):
    """Which derivatives of terms add up to entries of a part: where they are from and go."""

    source: np.ndarray
    place: np.ndarray


@dataclass(frozen=True, eq=False)
class Arrow:
    """Where a second derivative has entries, by the terms that it comes from.

    members
        For each term the coordinate of each colour that it depends on, -1 for none. Those
        of the first colour are the diagonal.
    dim
        Rows of the matrix.
    """

    members: np.ndarray  # (terms, colours)
    dim: int

    def equals(self, other: Any) -> bool:
        """Tell whether entries come from the same terms and go to the same places."""
        is_like = isinstance(other, Arrow) and self.dim == other.dim
        return is_like and np.array_equal(self.members, other.members)

    @cached_property
    def free(self) -> np.ndarray:
        """The coordinates of the first colour."""
        first = self.members[:, 0]
        return np.unique(first[first >= 0])

    @cached_property
    def rest(self) -> np.ndarray:
        """All other coordinates."""
        return np.setdiff1d(np.arange(self.dim), self.free)

    @cached_property
    def place(self) -> np.ndarray:
        """Where each coordinate stands in its part, (dim,)."""
        place = np.zeros(self.dim, int)
        place[self.free], place[self.rest] = (
            np.arange(self.free.size),
            np.arange(self.rest.size),
        )
        return place

    @cached_property
    def _pairs(self) -> np.ndarray:
        """The pairs of colours that some term has both of, (pairs, 2)."""
        present = (self.members >= 0).astype(int)
        return np.argwhere(np.triu(present.T @ present) > 0)

    @cached_property
    def cost(self) -> int:
        """How many evaluations a second derivative costs, about."""
        return 4 * len(self._pairs)

    @cached_property
    def _entries(self) -> tuple[_Entries, _Entries, _Entries]:
        """What adds up to the diagonal, to the border and to the rest."""
        found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        size = self.rest.size
        for number, (first, second) in enumerate(self._pairs):
            ends = self.members[:, [first, second]]
            term = np.flatnonzero((ends >= 0).all(1))
            row, column = self.place[ends[term]].T
            source = number * len(ends) + term
            if second == 0:
                found[0].append((source, row))
            elif first == 0:
                found[1].append((source, row * size + column))
            else:
                found[2].append((source, row * size + column))
                if first != second:
                    found[2].append((source, column * size + row))
        none = np.zeros((2, 0), int)
        diagonal, border, rest = (
            _Entries(*np.concatenate([none, *part], 1)) for part in found
        )
        return diagonal, border, rest

    def hessian(self, energy: Energy, position: Array) -> Parts:
        """Return the second derivative of a sum of terms, which are one vector."""
        colours = np.zeros((self.members.shape[1], self.dim), position.dtype)
        term, colour = np.nonzero(self.members >= 0)
        colours[colour, self.members[term, colour]] = 1.0

        def one(first: Array, second: Array) -> Array:
            def slope(x: Array) -> Array:
                return jax.jvp(energy, (x,), (first,))[1]

            return jax.jvp(slope, (position,), (second,))[1]

        ends = (jnp.asarray(colours[self._pairs[:, i]]) for i in (0, 1))
        derivatives = jax.vmap(one)(*ends).ravel()
        num_free, num_rest = self.free.size, self.rest.size
        shapes = (num_free,), (num_free, num_rest), (num_rest, num_rest)
        return Parts(
            *(
                jnp.zeros(np.prod(shape), position.dtype)
                .at[entries.place]
                .add(derivatives[entries.source])
                .reshape(shape)
                for entries, shape in zip(self._entries, shapes, strict=True)
            )
        )

    def multiply(self, parts: Parts, vector: np.ndarray) -> np.ndarray:
        """Return the matrix times a vector."""
        free, rest = vector[self.free], vector[self.rest]
        product = np.zeros(self.dim)
        product[self.free] = parts.diagonal * free + parts.border @ rest
        product[self.rest] = parts.border.T @ free + parts.rest @ rest
        return product

    def factorise(self, matrix: Parts, damping: Array | float = 0.0) -> ArrowFactor:
        """Factorise a precision; not finite unless it is positive definite.

        Parameters
        ----------
        damping
            What is added to the diagonal, in units of it.
        """
        diagonal, border, rest = matrix
        root = jnp.sqrt(diagonal + damped(diagonal, damping))
        border = border / root[:, None]
        rest = rest + jnp.diag(damped(jnp.diagonal(rest), damping))
        return ArrowFactor(root, border, inverse_cholesky(rest - border.T @ border))

    def solve_transposed(self, factor: ArrowFactor, rows: Array) -> Array:
        """Return :math:`L^{-T} z`: of standard normal rows, draws of that precision."""
        rest = rows[..., self.rest] @ factor.inverse
        free = (rows[..., self.free] - rest @ factor.border.T) / factor.root
        return self._join(free, rest)

    def multiply_transposed(self, factor: ArrowFactor, rows: Array) -> Array:
        r"""Return :math:`L^\top x`, the inverse of :meth:`solve_transposed`."""
        rest = rows[..., self.rest]
        free = rows[..., self.free] * factor.root + rest @ factor.border.T
        flat = rest.reshape(-1, rest.shape[-1])
        own = solve_triangular(factor.inverse, flat.T, lower=True, trans=1).T
        return self._join(free, own.reshape(rest.shape))

    def log_diagonal(self, factor: ArrowFactor) -> Array:
        """Return the logarithm of each coordinate's entry on the diagonal of L, (dim,)."""
        return self._join(jnp.log(factor.root), -jnp.log(jnp.diagonal(factor.inverse)))

    def _join(self, free: Array, rest: Array) -> Array:
        """Put the parts of vectors in the order of the coordinates."""
        order = np.argsort(np.concatenate([self.free, self.rest]))
        return jnp.concatenate([free, rest], -1)[..., order]
