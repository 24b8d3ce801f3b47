r"""One preconditioned Langevin move, and the work it costs.

With a preconditioner :math:`M = L L^\top` and step size :math:`h`, a particle moves by

.. math::

    v = -h p + \sqrt{2h}\, u, \qquad p = L^\top \nabla U(x), \qquad x' = x + b + L v,

and its log-weight changes by the potentials' difference plus

.. math::

    \tfrac12 v \cdot (p + p') + \tfrac h4 (p^2 - p'^2)

with :math:`p'` at :math:`x'` under the next target. The identity holds for any :math:`h`,
:math:`L` and shift :math:`b` that are fixed before the move: they decide the variance of
the weights and not their mean. Where the target stands still and there is no shift, the
same number is the log-ratio of a Metropolis test.

The noise :math:`u = c m + \sqrt{1 - c^2}\, \xi` is standard normal. With :math:`c = 0` it
is drawn anew; otherwise the particle keeps part of its momentum, and short steps add up
to long ones. The move is one leapfrog step of Hamiltonian dynamics, which begins with
the momentum :math:`u` and ends with

.. math::

    m' = u - \sqrt{h/2}\,(p + p'),

and the work above is :math:`(u^2 - m'^2) / 2`: the same weight, or test, is that of the
position and the momentum together.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.engine.factor import Factor, apply, apply_transposed
from numpyro_jala.engine.partition import Partition

_LARGEST = 1e15
#: How far the force may push a whitened coordinate in one move. A Gaussian particle is pushed
#: as far once in 10⁹ moves, but one at a cliff would be thrown out of all reach.
_FARTHEST = 3.0
_LONG_ROW = 1_000


class Kernel(NamedTuple):
    """How the particles of one island move.

    step_size
        :math:`h` of each component; zero leaves a particle where the shift puts it.
    factor
        :math:`L`
    shift
        :math:`b`, which carries the cloud along with its target.
    memory
        :math:`c` of each component, what a particle keeps of its momentum.
    """

    step_size: Array  # (components,)
    factor: Factor
    shift: Array  # (dim,)
    memory: Array  # (components,)


class Move(NamedTuple):
    """Where the particles went, and what the weight needs to know of the way."""

    position: Array  # (num_particles, dim)
    momentum: Array  # (num_particles, dim), at the start
    force: Array  # (num_particles, dim)


def draw_noise(rng_key: PRNGKey, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw standard normals.

    Short rows are drawn as one, over which a compiler for CPUs is quick: with three axes
    the generator takes it five times as long. Where rows are long, running takes longer
    than compiling, and a compiler weaves the draws into the move only if their shapes
    agree. The numbers are the same.
    """
    drawn_as = shape if shape[-1] >= _LONG_ROW else (math.prod(shape),)
    return random.normal(rng_key, drawn_as, dtype).reshape(shape)


def pull(partition: Partition, kernel: Kernel, gradient: Array) -> Array:
    """Return the force on whitened particles, bounded whatever the gradient is.

    Weights and tests are exact for any function of the position in the place of the force.
    """
    force = jnp.nan_to_num(apply_transposed(kernel.factor, partition, gradient))
    if not kernel.factor.blocks:  # not whitened: a move may have to be long
        return jnp.clip(force, -_LARGEST, _LARGEST)
    bound = jnp.minimum(_FARTHEST / partition.spread(kernel.step_size), _LARGEST)
    return jnp.clip(force, -bound, bound)


def _velocity(step_size: Array, force: Array, momentum: Array) -> Array:
    return -step_size * force + jnp.sqrt(2 * step_size) * momentum


def move(
    partition: Partition,
    rng_key: PRNGKey,
    kernel: Kernel,
    position: Array,
    gradient: Array,
    momentum: Array,
) -> Move:
    """Draw the next position of each particle.

    Where no momentum is kept, ``momentum`` has no columns.
    """
    c, h = partition.spread(kernel.memory), partition.spread(kernel.step_size)
    noise = draw_noise(rng_key, position.shape, position.dtype)
    if momentum.shape[-1]:
        noise = c * momentum + jnp.sqrt(1 - c**2) * noise
    force = pull(partition, kernel, gradient)
    step = apply(kernel.factor, partition, _velocity(h, force, noise))
    return Move(position + kernel.shift + step, noise, force)


def work(partition: Partition, kernel: Kernel, moved: Move, new_gradient: Array) -> Array:
    """Return what the move adds to the log-weights beside the change of potential.

    (components, num_particles)
    """
    h = partition.spread(kernel.step_size)
    p, new_p = moved.force, pull(partition, kernel, new_gradient)
    velocity = _velocity(h, p, moved.momentum)
    terms = 0.5 * velocity * (p + new_p)
    terms += 0.25 * h * (p**2 - new_p**2)
    return partition.total(terms)


def last_momentum(
    partition: Partition, kernel: Kernel, moved: Move, new_gradient: Array
) -> Array:
    """Return the momentum with which the move ends."""
    p, new_p = moved.force, pull(partition, kernel, new_gradient)
    h = partition.spread(kernel.step_size)
    return moved.momentum - jnp.sqrt(h / 2) * (p + new_p)
