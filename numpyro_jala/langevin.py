r"""One preconditioned Langevin move, and the work it costs.

With a preconditioner :math:`M = L L^\top` and step size :math:`h`, a particle moves by

.. math::

    v = -h p + \sqrt{2h}\, \xi, \qquad p = f(L^\top \nabla U(x)), \qquad
    x' = x + b + L v,

and its log-weight changes by the potentials' difference plus

.. math:: \tfrac12 v \cdot (p + p') + \tfrac h4 (|p|^2 - |p'|^2)

with :math:`p'` the force at :math:`x'` under the next target. The identity holds for any
:math:`h`, :math:`L`, shift :math:`b` and function :math:`f` that are fixed before the
move: they decide the variance of the weights and not their mean.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import random

from numpyro_jala._typing import Array, PRNGKey

#: Components of the force on whitened particles beyond this are cut. At rest they have
#: unit variance, so only particles far from equilibrium or in a stiff corner notice.
FORCE_LIMIT = 6.0


class Kernel(NamedTuple):
    """How the particles of one island move.

    step_size
        :math:`h`.
    factor
        :math:`L`: lower triangular (dim, dim), the diagonal of one (dim,), or () for a
        multiple of the identity.
    shift
        :math:`b`, which carries the cloud along with its target.
    force_limit
        Largest absolute component of the force.
    """

    step_size: Array  # ()
    factor: Array  # (dim, dim), (dim,) or ()
    shift: Array  # (dim,)
    force_limit: Array  # ()


class Move(NamedTuple):
    """Where the particles went, and what the weight needs to know of the way."""

    position: Array  # (num_particles, dim)
    velocity: Array  # (num_particles, dim)
    force: Array  # (num_particles, dim)


def force(kernel: Kernel, gradient: Array) -> Array:
    """Return the force on whitened particles, finite whatever the gradient is."""
    factor = kernel.factor
    pulled = gradient @ factor if factor.ndim == 2 else gradient * factor
    limit = kernel.force_limit
    return jnp.clip(jnp.nan_to_num(pulled, posinf=limit, neginf=-limit), -limit, limit)


def move(rng_key: PRNGKey, kernel: Kernel, position: Array, gradient: Array) -> Move:
    """Draw the next position of each particle."""
    h, factor = kernel.step_size, kernel.factor
    pulled = force(kernel, gradient)
    noise = random.normal(rng_key, position.shape, position.dtype)
    velocity = -h * pulled + jnp.sqrt(2 * h) * noise
    step = velocity @ factor.T if factor.ndim == 2 else velocity * factor
    return Move(position + kernel.shift + step, velocity, pulled)


def work(kernel: Kernel, moved: Move, new_gradient: Array) -> Array:
    """Return what the move adds to the log-weight beside the change of potential."""
    new_force = force(kernel, new_gradient)
    along = jnp.sum(moved.velocity * (moved.force + new_force), -1)
    ends = jnp.sum((moved.force - new_force) * (moved.force + new_force), -1)
    return 0.5 * along + 0.25 * kernel.step_size * ends
