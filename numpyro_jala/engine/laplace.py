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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, Potential
from numpyro_jala.engine.banded import Energy, total_energy
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.sparsity import Factor, Pattern, is_finite, solve

#: A Gaussian narrower than the posterior ruins the weights in its tails. Widened by this
#: over the root of the dimension, it is equally far from the posterior in any dimension.
WIDEN = 0.6
_NEWTON_STEPS = 60
#: Nats above the mode that are as good as none: any centre is right, a near one is quick.
_NEAR = 1e-3
#: Units of the last digit of a potential that are as good as none: if a step is refused for
#: its rounding, it is damped, and so are coordinates in which particles no longer follow.
_ROUNDING = 4
#: The first damping where a Newton step fails, in units of the diagonal.
_DAMPING = 1e-3
#: Most damping with which a second derivative still counts as that of a mode.
_MOST_DAMPING = 0.1


class Coordinates(NamedTuple):
    """The mode of a posterior, and a factor of the precision there."""

    centre: Array  # (dim,)
    factor: Factor


class Mode(NamedTuple):
    """Where a potential is lowest, and a factor of its second derivative near there.

    damping
        What the second derivative needs to be positive definite, in units of its diagonal.
    """

    position: Array  # (dim,)
    factor: Factor
    damping: Array  # ()
    arrived: Array  # ()
    num_steps: Array  # ()


class _Search(NamedTuple):
    position: Array
    value: Array
    factor: Factor
    used: Array  # the damping of the factor
    damping: Array  # the next one to try
    decrease: Array
    bent: Array  # whether the second derivative was not positive definite
    num_steps: Array


def _begin(energy: Energy, pattern: Pattern, start: Array) -> _Search:
    """Return a search that has not found anything yet."""

    def factor(x: Array) -> Factor:
        return pattern.factorise(pattern.hessian(energy, x))

    nowhere = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype),
        jax.eval_shape(factor, start),
    )
    zero = jnp.zeros((), start.dtype)
    return _Search(
        start,
        total_energy(energy, start),
        nowhere,
        used=zero,
        damping=zero,
        decrease=zero + jnp.inf,
        bent=jnp.asarray(False),
        num_steps=jnp.zeros((), int),
    )


def _near(value: Array) -> Array:
    """Return how many nats above the mode are as good as none, by the potential there."""
    return jnp.maximum(_NEAR, _ROUNDING * np.finfo(value.dtype).eps * jnp.abs(value))


def find_mode(
    energy: Energy, pattern: Pattern, start: Array, if_convex: bool = False
) -> Mode:
    """Minimise by damped Newton steps.

    With ``if_convex`` the search ends where the second derivative is not positive definite,
    which may be long before it would find that there is no mode.
    """
    total = partial(total_energy, energy)

    def unfinished(search: _Search) -> Array:
        more = (search.decrease > _near(search.value)) | ~jnp.isfinite(search.decrease)
        more &= (search.num_steps < _NEWTON_STEPS) & (search.damping < 1e8)
        return more & ~(if_convex & search.bent)

    def improve(search: _Search) -> _Search:
        here, value, kept, used, damping, _, bent, count = search
        gradient = jax.grad(total)(here)
        factor = pattern.factorise(pattern.hessian(energy, here), damping)
        step = solve(pattern, factor, gradient)
        there = here - step
        new = total(there)
        decrement = 0.5 * jnp.abs(gradient @ step)
        # Near the mode the potential cannot be told to fall, for rounding.
        better = (new < value) | (decrement < _near(value)) | ~jnp.isfinite(value)
        better &= jnp.isfinite(new)
        worse = jnp.maximum(4 * damping, _DAMPING)
        return _Search(
            jnp.where(better, there, here),
            jnp.where(better, new, value),
            jax.tree.map(lambda a, b: jnp.where(better, a, b), factor, kept),
            jnp.where(better, damping, used),
            jnp.where(better, jnp.where(damping > 1e-5, damping / 5, 0.0), worse),
            jnp.where(better, jnp.maximum(decrement, value - new), jnp.inf),
            bent | ((damping == 0) & ~is_finite(factor)),
            count + 1,
        )

    found = lax.while_loop(unfinished, improve, _begin(energy, pattern, start))
    # Where much damping is needed the potential has a saddle or a maximum.
    arrived = (found.decrease <= _near(found.value)) & (found.used <= _MOST_DAMPING)
    arrived &= is_finite(found.factor)
    return Mode(found.position, found.factor, found.used, arrived, found.num_steps)


#: How far from the mode a potential is looked at, in standard deviations, and how often.
_AWAY, _LOOKS = (1.0, 2.0, 4.0), 2


def is_convex(energy: Energy, pattern: Pattern, mode: Mode) -> Array:
    """Tell whether a potential is convex at some draws around its mode.

    Then the posterior has one mode and no heavy tails there, and coordinates of the mode
    serve all of it.
    """
    shape = (len(_AWAY) * _LOOKS, pattern.dim)
    noise = random.normal(random.key(0), shape, mode.position.dtype)
    away = jnp.repeat(jnp.asarray(_AWAY, noise.dtype), _LOOKS)[:, None] * noise
    points = mode.position + pattern.solve_transposed(mode.factor, away)

    def one(point: Array) -> Array:
        return is_finite(pattern.factorise(pattern.hessian(energy, point)))

    return lax.map(one, points).all()


def coordinates(
    energy_fn: Callable[[Array, Array], Array], pattern: Pattern, params: Array, mode: Mode
) -> Coordinates:
    """Return the coordinates at some parameters, differentiable in them.

    Parameters
    ----------
    energy_fn
        ``energy_fn(params, position)`` are the terms of the potential, of all components.
    mode
        At the same parameters.
    """
    mode, energy = lax.stop_gradient(mode), partial(energy_fn, params)

    # Two more steps do not go anywhere, but their first and second derivatives are those
    # of the mode.
    def refine(centre: Array, _: None) -> tuple[Array, None]:
        slope = jax.grad(partial(total_energy, energy))(centre)
        return centre - solve(pattern, mode.factor, slope), None

    centre, _ = lax.scan(refine, mode.position, length=2)
    factor = pattern.factorise(pattern.hessian(energy, centre), mode.damping)
    return Coordinates(centre, factor)


def to_position(found: Coordinates, pattern: Pattern, whitened: Array) -> Array:
    """Map whitened rows (..., dim) to latents."""
    return found.centre + pattern.solve_transposed(found.factor, whitened)


def to_whitened(found: Coordinates, pattern: Pattern, position: Array) -> Array:
    """Map latents (..., dim) to whitened rows."""
    return pattern.multiply_transposed(found.factor, position - found.centre)


def reference_scale(sizes: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the reference in whitened components of some sizes."""
    return 1 + WIDEN / np.sqrt(sizes)


class Whitening(NamedTuple):
    """What whitened coordinates are made from.

    energy_fn
        The terms of the potential at some parameters, see :func:`coordinates`.
    start
        Near the mode, (dim,).
    """

    potential_fn: Potential
    energy_fn: Callable[[Array, Array], Array]
    partition: Partition
    pattern: Pattern
    start: Array

    def mode(self, params: Array) -> Mode:
        """Find the mode at some parameters."""
        held = lax.stop_gradient(params)
        return find_mode(partial(self.energy_fn, held), self.pattern, self.start)

    def coordinates(self, params: Array) -> Coordinates:
        """Find the coordinates at some parameters."""
        return coordinates(self.energy_fn, self.pattern, params, self.mode(params))

    def potential_at(self, params: Array) -> Potential:
        """Return the potential of whitened particles, from a Gaussian to the posterior.

        It may be called, and differentiated, at these parameters alone.
        """
        partition, pattern, mode = self.partition, self.pattern, self.mode(params)
        ones = jnp.ones((partition.num_components,), self.start.dtype)
        scale = reference_scale(partition.sizes).astype(self.start.dtype)
        log_norm = partition.sizes * (0.5 * np.log(2 * np.pi) + np.log(scale))

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            found = coordinates(self.energy_fn, pattern, params, mode)
            joint = self.potential_fn(params, ones, to_position(found, pattern, position))
            volume = pattern.log_diagonal(found.factor)
            squares, volumes = (
                partition.total(each[None])[..., 0] for each in (position**2, volume)
            )
            reference = 0.5 * squares / scale**2 + log_norm
            return (1 - temperature) * reference + temperature * (joint + volumes)

        return potential
