r"""Coordinates in which a posterior is nearly standard normal.

Particles can teach each other the shape of a few hundred latents, not that of thousands.
The model itself knows it: with the mode :math:`m(\theta)` of the posterior and a factor of
the second derivative there, :math:`L(\theta) L(\theta)^\top = \nabla^2 U(m(\theta))`,
particles live in

.. math:: x = m(\theta) + L(\theta)^{-\top} z .

Their potential is that of the latents plus :math:`\log\det L(\theta)`. Whatever
:math:`m` and :math:`L` are, no integral changes: they make particles travel with the
parameters, and where the posterior is Gaussian :math:`z` stays as it is, its weights do
not change and its score is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, Potential
from numpyro_jala.engine import banded
from numpyro_jala.engine.banded import Band, BandFactor
from numpyro_jala.engine.partition import Partition

#: A Gaussian narrower than the posterior ruins the weights in its tails. Widened by this
#: over the root of the dimension, it is equally far from the posterior in any dimension.
WIDEN = 0.6
_NEWTON_STEPS = 60
#: Nats above the mode that are as good as none: any centre is right, a near one is quick.
_NEAR = 1e-3
#: The first damping where a Newton step fails, in units of the diagonal.
_DAMPING = 1e-3
#: Most damping with which a second derivative still counts as that of a mode.
_MOST_DAMPING = 0.1

Energy: TypeAlias = Callable[[Array], Array]


class Coordinates(NamedTuple):
    """The mode of a posterior, and a factor of the precision there."""

    centre: Array  # (dim,)
    factor: BandFactor


class Mode(NamedTuple):
    """Where a potential is lowest, and a factor of its second derivative near there.

    damping
        What the second derivative needs to be positive definite, in units of its diagonal.
    """

    position: Array  # (dim,)
    factor: BandFactor
    damping: Array  # ()
    arrived: Array  # ()
    num_steps: Array  # ()


class _Search(NamedTuple):
    position: Array
    value: Array
    factor: BandFactor
    used: Array  # the damping of the factor
    damping: Array  # the next one to try
    decrease: Array
    bent: Array  # whether the second derivative was not positive definite
    num_steps: Array


def _damped_factor(energy: Energy, band: Band, x: Array, damping: Array) -> BandFactor:
    diagonal, below = banded.hessian_blocks(energy, band, x)
    size = 1e-6 + jnp.abs(jnp.diagonal(diagonal, axis1=-2, axis2=-1))
    added = (damping * size)[..., None] * jnp.eye(band.block, dtype=x.dtype)
    return banded.factorise(diagonal + added, below)


def _begin(energy: Energy, band: Band, start: Array) -> _Search:
    """Return a search that has not found anything yet."""
    shape = (band.num_blocks, band.block, band.block)
    nan = jnp.full(shape, jnp.nan, start.dtype)
    zero = jnp.zeros((), start.dtype)
    return _Search(
        start,
        energy(start),
        BandFactor(nan, nan),
        used=zero,
        damping=zero,
        decrease=zero + jnp.inf,
        bent=jnp.asarray(False),
        num_steps=jnp.zeros((), int),
    )


def find_mode(energy: Energy, band: Band, start: Array, if_convex: bool = False) -> Mode:
    """Minimise by damped Newton steps.

    With ``if_convex`` the search ends where the second derivative is not positive definite,
    which may be long before it would find that there is no mode.
    """

    def unfinished(search: _Search) -> Array:
        more = (search.decrease > _NEAR) | ~jnp.isfinite(search.decrease)
        more &= (search.num_steps < _NEWTON_STEPS) & (search.damping < 1e8)
        return more & ~(if_convex & search.bent)

    def improve(search: _Search) -> _Search:
        here, value, kept, used, damping, _, bent, count = search
        gradient = jax.grad(energy)(here)
        factor = _damped_factor(energy, band, here, damping)
        step = banded.solve(factor, band, gradient)
        there = here - step
        new = energy(there)
        decrement = 0.5 * jnp.abs(gradient @ step)
        # Near the mode the potential cannot be told to fall, for rounding.
        better = (new < value) | (decrement < _NEAR) | ~jnp.isfinite(value)
        better &= jnp.isfinite(new)
        worse = jnp.maximum(4 * damping, _DAMPING)
        return _Search(
            jnp.where(better, there, here),
            jnp.where(better, new, value),
            jax.tree.map(lambda a, b: jnp.where(better, a, b), factor, kept),
            jnp.where(better, damping, used),
            jnp.where(better, jnp.where(damping > 1e-5, damping / 5, 0.0), worse),
            jnp.where(better, jnp.maximum(decrement, value - new), jnp.inf),
            bent | ((damping == 0) & ~jnp.isfinite(factor.inverse).all()),
            count + 1,
        )

    found = lax.while_loop(unfinished, improve, _begin(energy, band, start))
    # Where much damping is needed the potential has a saddle or a maximum.
    arrived = (found.decrease <= _NEAR) & (found.used <= _MOST_DAMPING)
    arrived &= jnp.isfinite(found.factor.inverse).all()
    return Mode(found.position, found.factor, found.used, arrived, found.num_steps)


#: How far from the mode a potential is looked at, in standard deviations, and how often.
_AWAY, _LOOKS = (1.0, 2.0, 4.0), 2


def is_convex(energy: Energy, band: Band, mode: Mode) -> Array:
    """Tell whether a potential is convex at some draws around its mode.

    Then the posterior has one mode and no heavy tails there, and coordinates of the mode
    serve all of it.
    """
    shape = (len(_AWAY) * _LOOKS, band.dim)
    noise = random.normal(random.key(0), shape, mode.position.dtype)
    away = jnp.repeat(jnp.asarray(_AWAY, noise.dtype), _LOOKS)[:, None] * noise
    points = mode.position + banded.solve_transposed(mode.factor, band, away)

    def one(point: Array) -> Array:
        blocks = banded.hessian_blocks(energy, band, point)
        return jnp.isfinite(banded.factorise(*blocks).inverse).all()

    return lax.map(one, points).all()


def coordinates(
    energy_fn: Callable[[Array, Array], Array], band: Band, params: Array, mode: Mode
) -> Coordinates:
    """Return the coordinates at some parameters, differentiable in them.

    Parameters
    ----------
    energy_fn
        ``energy_fn(params, position)`` is the potential, all components together.
    mode
        At the same parameters.
    """
    mode = lax.stop_gradient(mode)

    # Two more steps do not go anywhere, but their first and second derivatives are those
    # of the mode.
    def refine(centre: Array, _: None) -> tuple[Array, None]:
        slope = jax.grad(energy_fn, 1)(params, centre)
        return centre - banded.solve(mode.factor, band, slope), None

    centre, _ = lax.scan(refine, mode.position, length=2)
    factor = _damped_factor(partial(energy_fn, params), band, centre, mode.damping)
    return Coordinates(centre, factor)


def to_position(found: Coordinates, band: Band, whitened: Array) -> Array:
    """Map whitened rows (..., dim) to latents."""
    return found.centre + banded.solve_transposed(found.factor, band, whitened)


def to_whitened(found: Coordinates, band: Band, position: Array) -> Array:
    """Map latents (..., dim) to whitened rows."""
    return banded.multiply_transposed(found.factor, band, position - found.centre)


def reference_scale(dim: int) -> float:
    """Return the standard deviation of the reference in each whitened coordinate."""
    return 1 + WIDEN / dim**0.5


class Whitening(NamedTuple):
    """What whitened coordinates are made from."""

    potential_fn: Potential
    partition: Partition
    band: Band
    start: Array  # (dim,), near the mode

    def energy(self, params: Array, position: Array) -> Array:
        """Return the potential of the posterior, all components together."""
        ones = jnp.ones((self.partition.num_components,), position.dtype)
        return self.potential_fn(params, ones, position).sum()

    def mode(self, params: Array) -> Mode:
        """Find the mode at some parameters."""
        held = lax.stop_gradient(params)
        return find_mode(partial(self.energy, held), self.band, self.start)

    def coordinates(self, params: Array) -> Coordinates:
        """Find the coordinates at some parameters."""
        return coordinates(self.energy, self.band, params, self.mode(params))

    def potential_at(self, params: Array) -> Potential:
        """Return the potential of whitened particles, from a Gaussian to the posterior.

        It may be called, and differentiated, at these parameters alone.
        """
        partition, band, mode = self.partition, self.band, self.mode(params)
        ones = jnp.ones((partition.num_components,), self.start.dtype)
        scale = reference_scale(partition.dim)
        log_norm = partition.sizes * (0.5 * np.log(2 * np.pi) + np.log(scale))

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            found = coordinates(self.energy, band, params, mode)
            joint = self.potential_fn(params, ones, to_position(found, band, position))
            volume = banded.log_diagonal(found.factor, band)
            squares, volumes = (
                partition.total(each[None])[..., 0] for each in (position**2, volume)
            )
            reference = 0.5 * squares / scale**2 + log_norm
            return (1 - temperature) * reference + temperature * (joint + volumes)

        return potential


#: Widths of a band that are tried, in turn.
_WIDTHS = (2, 8, 40)


def band_probes(order: np.ndarray) -> np.ndarray:
    """Return vectors whose products with a matrix tell the width of its band.

    One vector of random signs, then the probes of each width that is tried.
    """
    signs = np.where(np.random.default_rng(0).random(order.size) < 0.5, -1.0, 1.0)
    probes = [band.probes for band in _bands(order)]
    return np.concatenate([signs[None], *probes]).astype(np.float32)


def _bands(order: np.ndarray) -> list[Band]:
    return [Band(order, width) for width in _WIDTHS if 4 * width < order.size]


def find_band(order: np.ndarray, products: np.ndarray) -> Band:
    """Find how wide a band is, given products (points, probes, dim) at some points.

    A width will do if the entries that its probes show make up the product with the
    random signs. To be wrong would cost precision and no more. A matrix without a narrow
    band is dense.
    """
    signs, first = band_probes(order)[0], 1
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
    size = np.sum(np.abs(entries), 1)
    error = np.abs(said - whole[band.order])
    return bool(np.all(error <= 1e-3 * size + 1e-6 * size.max()))
