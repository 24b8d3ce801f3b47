"""Where the second derivative of a potential has entries, and how it is factorised.

A pattern is a band, of coordinates or of their sums, or an arrow. Each finds a second
derivative at a position, factorises it, and applies the factor: all that
:mod:`~numpyro_jala.engine.laplace` needs.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.engine.arrow import Arrow, ArrowFactor, Parts
from numpyro_jala.engine.banded import Band, BandFactor, Energy

Factor: TypeAlias = BandFactor | ArrowFactor


class Pattern(Protocol):
    """What bands and arrows do, each with matrices and factors of its own."""

    @property
    def dim(self) -> int:
        """Rows of the matrix."""

    @property
    def cost(self) -> int:
        """How many evaluations a second derivative costs, about."""

    def hessian(self, energy: Energy, position: Array) -> Any:
        """Return the second derivative of a sum of terms."""

    def factorise(self, matrix: Any, damping: Array | float = 0.0) -> Any:
        """Factorise a precision, with so much of its diagonal added."""

    def solve_transposed(self, factor: Any, rows: Array) -> Array:
        """Return :math:`L^{-T} z`: of standard normal rows, draws of that precision."""

    def multiply_transposed(self, factor: Any, rows: Array) -> Array:
        """Undo :meth:`solve_transposed`."""

    def log_diagonal(self, factor: Any) -> Array:
        """Return the logarithm of each coordinate's entry on the diagonal of L."""


#: Most colours of the latents in an arrow: a second derivative takes an evaluation a pair.
_MOST_COLOURS = 8
#: Most multiplications that factorise an arrow, and most entries of its border.
_MOST_WORK, _MOST_ENTRIES = 2e10, 2**25


def is_finite(factor: Factor) -> Array:
    """Tell whether a matrix was positive definite, so that there is a factor."""
    return jnp.isfinite(factor.inverse).all()


def solve(pattern: Pattern, factor: Factor, vector: Array) -> Array:
    """Return the inverse of the precision times a vector."""

    def backward(rows: Array) -> Array:
        return pattern.solve_transposed(factor, rows)

    (whitened,) = jax.linear_transpose(backward, vector)(vector)
    return backward(whitened)


# -- a band ------------------------------------------------------------------------------

#: Widths of a band that are tried, in turn.
_WIDTHS = (2, 8, 40)


def band_probes(order: np.ndarray) -> np.ndarray:
    """Return vectors whose products with a matrix tell the width of its band.

    One vector of random signs, then the probes of each width that is tried.
    """
    probes = [band.probes for band in _bands(order)]
    return np.concatenate([_signs(order.size)[None], *probes]).astype(np.float32)


def _signs(dim: int) -> np.ndarray:
    return np.where(np.random.default_rng(0).random(dim) < 0.5, -1.0, 1.0)


def _bands(order: np.ndarray) -> list[Band]:
    return [Band(order, width) for width in _WIDTHS if 4 * width < order.size]


def find_band(order: np.ndarray, products: np.ndarray) -> Band:
    """Find how wide a band is, given products (points, probes, dim) at some points.

    A width will do if the entries that its probes show make up the product with the
    random signs. To be wrong would cost precision and no more. A matrix without a narrow
    band is dense.
    """
    signs, first = _signs(order.size), 1
    for band in _bands(order):
        last = first + len(band.probes)
        shown = zip(products[:, first:last], products[:, 0], strict=True)
        if all(_makes_up(band, probed, signs, whole) for probed, whole in shown):
            return band
        first = last
    return Band(np.arange(order.size), order.size)


def _makes_up(band: Band, probed: np.ndarray, signs: np.ndarray, whole: np.ndarray) -> bool:
    """Tell whether the entries of a band make up a product with random signs."""
    rows, offsets = np.arange(band.dim)[:, None], np.arange(-band.width, band.width + 1)
    columns = rows + offsets
    inside = (columns >= 0) & (columns < band.dim)
    entries = probed[:, band.order][columns % len(probed), rows]
    entries = np.where(inside, entries, 0.0).astype(np.float64)
    said = np.sum(entries * signs[band.order][np.clip(columns, 0, band.dim - 1)], 1)
    return _is_all(said, np.sum(np.abs(entries), 1), whole[band.order])


def _is_all(said: np.ndarray, size: np.ndarray, whole: np.ndarray) -> bool:
    """Tell whether products are the whole but for rounding, given those of their sizes."""
    error = np.abs(said - whole)
    return bool(np.all(error <= 1e-3 * size + 1e-6 * size.max()))


# -- an arrow ----------------------------------------------------------------------------


def find_arrow(members: np.ndarray, order: np.ndarray) -> Arrow | None:
    """Find an arrow, given the coordinates that each term depends on; None if it is large.

    Parameters
    ----------
    members
        (terms, most coordinates of one), filled up by -1.
    order
        In which the coordinates get their colours, (dim,).
    """
    colour = _colour(members, order)
    num_colours = int(colour.max()) + 1
    if num_colours > _MOST_COLOURS:
        return None
    rank = np.argsort(np.argsort(-np.bincount(colour), kind="stable"))
    term, column = np.nonzero(members >= 0)
    ends = members[term, column]
    by_colour = np.full((len(members), num_colours), -1)
    by_colour[term, rank[colour[ends]]] = ends
    found = Arrow(by_colour, order.size)
    num_free, num_rest = found.free.size, found.rest.size
    work = num_free * num_rest**2 + num_rest**3 / 3
    fits = work <= _MOST_WORK and num_free * num_rest <= _MOST_ENTRIES
    return found if fits else None


def makes_up(arrow: Arrow, parts: Parts, products: np.ndarray) -> bool:
    """Tell whether an arrow makes up products with random signs, all at some points."""
    signs, whole = _signs(arrow.dim), [each.astype(float) for each in products]
    points = [
        Parts(*(leaf.astype(float) for leaf in rows)) for rows in zip(*parts, strict=True)
    ]
    return all(
        _is_all(
            arrow.multiply(here, signs),
            arrow.multiply(jax.tree.map(np.abs, here), np.ones(arrow.dim)),
            product,
        )
        for here, product in zip(points, whole, strict=True)
    )


def _colour(members: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Give each coordinate the first colour that no other one in its terms has."""
    ends, dim = members.ravel(), order.size
    entries = np.argsort(ends, kind="stable")
    first = np.searchsorted(ends[entries], np.arange(dim + 1))
    terms = entries // members.shape[1]
    colour = np.full(dim + 1, -1)  # the last one is read at -1
    for one in order:
        taken = colour[members[terms[first[one] : first[one + 1]]]]
        seen = np.zeros(members.shape[1] * (taken.shape[0] + 1), bool)
        seen[taken[(taken >= 0) & (taken < seen.size)]] = True
        colour[one] = int(np.argmin(seen))
    return colour[:-1]
