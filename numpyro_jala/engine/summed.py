r"""A band of the sums of coordinates.

A random walk may be written as the cumulative sum :math:`w = S u` of its steps. All later
observations depend on a step, so that the second derivative in the steps is dense; in the
sums it has the band of a walk. With :math:`P = L L^\top` there, the precision of the steps
is :math:`S^\top P S`, of which :math:`S^\top L` is a factor, and :math:`S`, a triangle of
ones, has the determinant one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.engine.banded import Band, BandFactor, Blocks, Energy


@dataclass(frozen=True, eq=False)
class Summed:
    """Where a second derivative in the sums of coordinates may have entries.

    lanes
        Coordinates that are summed up along each row; the others are left as they are.
    band
        Of the sums.
    """

    lanes: tuple[np.ndarray, ...]  # each (rows, length)
    band: Band

    @property
    def dim(self) -> int:
        """Rows of the matrix."""
        return self.band.dim

    @property
    def cost(self) -> int:
        """How many evaluations a second derivative costs, about."""
        return self.band.cost

    @cached_property
    def _previous(self) -> np.ndarray:
        """The coordinate before each one in its lane, ``dim`` where there is none."""
        previous = np.full(self.dim, self.dim)
        for lane in self.lanes:
            previous[lane[:, 1:]] = lane[:, :-1]
        return previous

    def sums(self, rows: Array) -> Array:
        """Sum up vectors (..., dim) along the lanes."""
        for lane in self.lanes:
            rows = rows.at[..., lane].set(jnp.cumsum(rows[..., lane], -1))
        return rows

    def differences(self, rows: Array) -> Array:
        """Undo :meth:`sums`."""
        padded = jnp.concatenate([rows, jnp.zeros_like(rows[..., :1])], -1)
        return rows - padded[..., self._previous]

    def energy_of_sums(self, energy: Energy) -> Energy:
        """Return an energy as a function of the sums."""
        return lambda sums: energy(self.differences(sums))

    def hessian(self, energy: Energy, position: Array) -> Blocks:
        """Return the blocks of the second derivative in the sums."""
        return self.band.hessian(self.energy_of_sums(energy), self.sums(position))

    def factorise(self, matrix: Blocks, damping: Array | float = 0.0) -> BandFactor:
        """Factorise a precision of the sums; not finite unless it is positive definite."""
        return self.band.factorise(matrix, damping)

    def solve_transposed(self, factor: BandFactor, rows: Array) -> Array:
        """Return the steps of draws of the sums, given standard normal rows."""
        return self.differences(self.band.solve_transposed(factor, rows))

    def multiply_transposed(self, factor: BandFactor, rows: Array) -> Array:
        """Undo :meth:`solve_transposed`."""
        return self.band.multiply_transposed(factor, self.sums(rows))

    def log_diagonal(self, factor: BandFactor) -> Array:
        """Return the logarithm of each coordinate's entry on the diagonal of L, (dim,)."""
        return self.band.log_diagonal(factor)
