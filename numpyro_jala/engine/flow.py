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
where the posterior is Gaussian. An island learns them from the others,
for each component. All arrays are of one block of components of similar size.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.engine.geometry import can_regress, fill, regress
from numpyro_jala.engine.loo import (
    loo_covariance,
    loo_mean,
    loo_products,
    loo_variance,
)


class Frame(NamedTuple):
    """How the gradients of the other islands depend on their positions.

    The curvature is a matrix for each component, or its diagonal.
    """

    centre: Array  # (num_islands, components, size)
    gradient: Array  # (num_islands, components, size), at the centre
    curvature: Array  # (num_islands, components, size, size) or (..., size)
    padding: np.ndarray | Array  # (components, size), one where padded


class Flow(NamedTuple):
    """How the particles follow one parameter."""

    shift: Array  # (num_islands, components, size)
    spread: Array  # (num_islands, components, size, size) or (..., size)


def _slope(
    weight: Array,
    position: Array,
    values: Array,
    padding: np.ndarray | Array,
    dense: bool,
) -> Array:
    """Regress columns on positions, each on all of them or on its own."""
    if not dense:
        variance = jnp.maximum(loo_variance(weight, position), 1e-20)
        return loo_products(weight, position, values) / variance
    covariance = fill(loo_covariance(weight, position, position), padding)
    cross = loo_covariance(weight, position, values)
    slope = regress(covariance, cross)
    return (slope + jnp.swapaxes(slope, -1, -2)) / 2


def frame(
    weight: Array,
    position: Array,
    gradient: Array,
    padding: np.ndarray,
    most_dense: int,
) -> Frame:
    """Learn each island's frame from the others.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, components, num_particles).
    position, gradient
        (num_islands, components, num_particles, size)
    padding
        (components, size), one where padded
    most_dense
        Size of the largest component whose coordinates are related to each other.
    """
    size = position.shape[-1]
    dense = size <= most_dense and bool(can_regress(weight, np.asarray(size)))
    return Frame(
        loo_mean(weight, position),
        loo_mean(weight, gradient),
        _slope(weight, position, gradient, padding, dense),
        padding,
    )


def change_by_scores(frame_: Frame, weight: Array, position: Array, score: Array) -> Array:
    """Return how the gradients change with the parameter, on average, by its scores.

    This needs no second derivatives, which miss the kinks of a density. For a Gaussian
    posterior the score is a linear function of the position, with this slope.

    Parameters
    ----------
    score
        (num_islands, components, num_particles)
    """
    values = jnp.broadcast_to(score[..., None], position.shape)
    if frame_.curvature.ndim == 3:
        return _slope(weight, position, values, frame_.padding, False)
    covariance = fill(loo_covariance(weight, position, position), frame_.padding)
    cross = loo_covariance(weight, position, score[..., None])
    return regress(covariance, cross)[..., 0]


def follow(
    frame_: Frame,
    weight: Array,
    position: Array,
    change: Array,
    mean_change: Array | None = None,
) -> Flow:
    """Learn each island's flow from the others.

    Parameters
    ----------
    change
        Derivatives of the gradients in the parameter, as ``position``.
    mean_change
        Another estimate of their mean, (num_islands, components, size).
    """
    curvature, dense = frame_.curvature, frame_.curvature.ndim == 4
    padding = frame_.padding
    curvature_change = _slope(weight, position, change, padding, dense)
    if mean_change is None:
        mean_change = loo_mean(weight, change)
    if not dense:
        curvature = curvature + padding
        spread = 0.5 * curvature_change / curvature
        return Flow((mean_change - spread * frame_.gradient) / curvature, spread)
    columns = [curvature_change, mean_change[..., None], frame_.gradient[..., None]]
    solved = regress(fill(curvature, padding), jnp.concatenate(columns, -1))
    spread = 0.5 * solved[..., :-2]
    correction = jnp.sum(spread * solved[..., None, :, -1], -1)
    return Flow(solved[..., -2] - correction, spread)


def displace(frame_: Frame, flow: Flow, position: Array) -> Array:
    r"""Return :math:`\phi(x)` at particles (num_islands, components, particles, size)."""
    centred = position - frame_.centre[..., None, :]
    spread, shift = flow.spread, flow.shift[..., None, :]
    if spread.ndim == 4:
        return shift + centred @ jnp.swapaxes(spread, -1, -2)
    return shift + centred * spread[..., None, :]


def rate(frame_: Frame, flow: Flow, position: Array, gradient: Array) -> Array:
    r"""Return :math:`\phi \cdot \nabla U - \mathrm{tr} A`, whose mean is zero."""
    spread = flow.spread
    is_dense = spread.ndim == 4
    trace = jnp.trace(spread, axis1=-2, axis2=-1) if is_dense else spread.sum(-1)
    displaced = displace(frame_, flow, position)
    return jnp.sum(displaced * gradient, -1) - trace[..., None]


def volume_curvature(flows: Flow) -> Array:
    r"""Return :math:`\mathrm{tr} A_p A_q`, for flows with a leading axis of parameters.

    It is the second derivative of minus the logarithm of the volume that particles take
    up as they follow, which counts as a part of their potential. Summed over components:
    (num_islands, num_params, num_params).
    """
    spread = flows.spread
    pairs = "pjcde,qjced->jpq" if spread.ndim == 5 else "pjcd,qjcd->jpq"
    return jnp.einsum(pairs, spread, spread)
