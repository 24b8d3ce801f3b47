r"""One preconditioned Langevin move, and the work it costs.

With a preconditioner :math:`M = L L^\top` and step size :math:`h`, a particle moves by

.. math::

    v = -h(x) p + \sqrt{2h(x)}\, \xi, \qquad p = L^\top \nabla U(x), \qquad
    x' = x + b + L v,

and its log-weight changes by the potentials' difference plus

.. math::

    \tfrac12 v \cdot (p + p') + \tfrac14 (h p^2 - h' p'^2)
        + \tfrac14 v^2 (1/h - 1/h') + \tfrac d2 \log (h / h')

with :math:`p'` and :math:`h'` at :math:`x'` under the next target. The identity holds for
any :math:`L`, shift :math:`b` and function :math:`h` that are fixed before the move: they
decide the variance of the weights and not their mean. Here :math:`h` is constant but for
particles on which the force is many times what it is at rest: in such a stiff corner of
the target they take steps as small as the force is large.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import random

from numpyro_jala._typing import Array, PRNGKey

#: A force is strong from this many times its size at rest.
FORCE_LIMIT = 3.0
_LARGEST = 1e15


class Kernel(NamedTuple):
    """How the particles of one island move.

    step_size
        :math:`h` where the force is not strong.
    factor
        :math:`L`: lower triangular (dim, dim), the diagonal of one (dim,), or () for a
        multiple of the identity.
    shift
        :math:`b`, which carries the cloud along with its target.
    force_limit
        Root mean square of the components of a strong force.
    """

    step_size: Array  # ()
    factor: Array  # (dim, dim), (dim,) or ()
    shift: Array  # (dim,)
    force_limit: Array  # ()


class Push(NamedTuple):
    """What drives the particles: a finite force, and the step size each may take."""

    force: Array  # (num_particles, dim)
    step_size: Array  # (num_particles, 1)


class Move(NamedTuple):
    """Where the particles went, and what the weight needs to know of the way."""

    position: Array  # (num_particles, dim)
    velocity: Array  # (num_particles, dim)
    push: Push


def push(kernel: Kernel, gradient: Array) -> Push:
    """Return the force on whitened particles, finite whatever the gradient is."""
    factor = kernel.factor
    pulled = gradient @ factor if factor.ndim == 2 else gradient * factor
    force = jnp.clip(jnp.nan_to_num(pulled), -_LARGEST, _LARGEST)
    mean_square = jnp.mean(force**2, -1, keepdims=True)
    share = jnp.minimum(1.0, kernel.force_limit**2 / jnp.maximum(mean_square, 1e-30))
    return Push(force, kernel.step_size * share)


def move(rng_key: PRNGKey, kernel: Kernel, position: Array, gradient: Array) -> Move:
    """Draw the next position of each particle."""
    driven = push(kernel, gradient)
    noise = random.normal(rng_key, position.shape, position.dtype)
    velocity = -driven.step_size * driven.force + jnp.sqrt(2 * driven.step_size) * noise
    factor = kernel.factor
    step = velocity @ factor.T if factor.ndim == 2 else velocity * factor
    return Move(position + kernel.shift + step, velocity, driven)


def work(kernel: Kernel, moved: Move, new_gradient: Array) -> Array:
    """Return what the move adds to the log-weight beside the change of potential."""
    (p, h), (new_p, new_h) = moved.push, push(kernel, new_gradient)
    v = moved.velocity
    terms = 0.5 * v * (p + new_p) + 0.25 * (h * p**2 - new_h * new_p**2)
    terms += 0.25 * v**2 * (1 / h - 1 / new_h) + 0.5 * jnp.log(h / new_h)
    return jnp.sum(terms, -1)
