r"""Follow a posterior as its parameters move, with an affine flow.

For a Gaussian posterior, whose potential has the gradient :math:`P (x - m)`, a change of
the parameter :math:`\theta_p` changes :math:`P` by :math:`D_p` and the gradient at the
centre :math:`c` of the cloud by :math:`\bar g_p`. Particles that move by

.. math::

    -\phi_p(x)\, d\theta_p, \qquad \phi_p(x) = b_p + A_p (x - c), \qquad
    A_p = \tfrac12 P^{-1} D_p, \qquad b_p = P^{-1} \bar g_p - A_p P^{-1} \bar g,

stay distributed as the posterior, so that the rate of their weights,
:math:`\partial_p U - \phi_p \cdot \nabla U + \mathrm{tr} A_p`, is the same for all. Under
any posterior its mean is the score, for any :math:`\phi_p` (Stein's identity).

:math:`P` and :math:`D_p` are regressions of gradients on positions, which have no noise
where the posterior is Gaussian. An island learns them from the others.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine.adaptation import (
    by_island,
    loo_covariance,
    loo_mean,
    loo_products,
    loo_variance,
)
from numpyro_jala.engine.geometry import can_regress, regress


class Frame(NamedTuple):
    """How the gradients of the others depend on their positions."""

    centre: Array  # (num_islands, dim)
    gradient: Array  # (num_islands, dim), at the centre
    curvature: Array  # (num_islands, dim, dim), or (num_islands, dim) for its diagonal


class Flow(NamedTuple):
    """How the particles follow one parameter."""

    shift: Array  # (num_islands, dim)
    spread: Array  # (num_islands, dim, dim), or (num_islands, dim) for a diagonal


def _slope(weight: Array, position: Array, values: Array, dense: bool) -> Array:
    """Regress columns on positions, each on all of them or on its own."""
    if not dense:
        variance = jnp.maximum(loo_variance(weight, position), 1e-20)
        return loo_products(weight, position, values) / variance
    covariance = loo_covariance(weight, position, position)
    cross = loo_covariance(weight, position, values)
    slope = by_island(regress, covariance, cross)
    return (slope + jnp.swapaxes(slope, 1, 2)) / 2


def frame(weight: Array, position: Array, gradient: Array, dense: bool) -> Frame:
    """Learn each island's frame from the others.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    position, gradient
        (num_islands, num_particles, dim)
    dense
        Whether coordinates are related to each other.
    """
    dense = dense and can_regress(weight, position.shape[-1])
    return Frame(
        loo_mean(weight, position),
        loo_mean(weight, gradient),
        _slope(weight, position, gradient, dense),
    )


def follow(frame_: Frame, weight: Array, position: Array, change: Array) -> Flow:
    """Learn each island's flow from the others.

    Parameters
    ----------
    change
        Derivatives of the gradients in the parameter, as ``position``.
    """
    curvature, dense = frame_.curvature, frame_.curvature.ndim == 3
    curvature_change = _slope(weight, position, change, dense)
    mean_change = loo_mean(weight, change)
    if not dense:
        spread = 0.5 * curvature_change / curvature
        return Flow((mean_change - spread * frame_.gradient) / curvature, spread)

    def solve(precision: Array, change: Array, mean_change: Array, rest: Array) -> Flow:
        right = jnp.concatenate([change, mean_change[:, None], rest[:, None]], 1)
        solved = regress(precision, right)
        spread = 0.5 * solved[:, :-2]
        return Flow(solved[:, -2] - spread @ solved[:, -1], spread)

    return by_island(solve, curvature, curvature_change, mean_change, frame_.gradient)


def displace(frame_: Frame, flow: Flow, position: Array) -> Array:
    r"""Return :math:`\phi(x)` at the particles (num_particles, dim) of one island."""
    centred = position - frame_.centre
    spread = flow.spread
    return flow.shift + (centred @ spread.T if spread.ndim == 2 else centred * spread)


def rate(frame_: Frame, flow: Flow, position: Array, gradient: Array) -> Array:
    r"""Return :math:`\phi \cdot \nabla U - \mathrm{tr} A`, whose mean is zero."""
    spread = flow.spread
    trace = jnp.trace(spread) if spread.ndim == 2 else spread.sum()
    return jnp.sum(displace(frame_, flow, position) * gradient, -1) - trace


def volume_curvature(flows: Flow) -> Array:
    r"""Return :math:`\mathrm{tr} A_p A_q`, for flows with a leading axis of parameters.

    It is the second derivative of minus the logarithm of the volume that particles take
    up as they follow, which counts as a part of their potential.
    """
    spread = flows.spread
    pairs = "pjde,qjed->jpq" if spread.ndim == 4 else "pjd,qjd->jpq"
    return jnp.einsum(pairs, spread, spread)
