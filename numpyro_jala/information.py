r"""What the data say about the parameters, from particles at rest.

The score and the information of the marginal likelihood are expectations under the
posterior (Louis 1982),

.. math::

    g = E[\nabla U], \qquad I = E[\nabla^2 U] - \mathrm{Cov}[\nabla U],

with derivatives in the parameters :math:`\theta`. Both hold for any potential with the
same marginal, and so for :math:`U(\theta, x - B(\theta - \hat\theta))` with a fixed
:math:`B`: particles that follow the parameters make both terms of :math:`I` small, and
their difference precise.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala import smc
from numpyro_jala._typing import Array, Potential
from numpyro_jala.smc import Target

#: With less information than this on an unconstrained scale a parameter is known up to
#: a factor of ten at best: for all that the data say it is at the edge of its support.
_LEAST = 0.5


class Moments(NamedTuple):
    """Expectations under the weights of each island."""

    score: Array  # (num_islands, num_params)
    outer: Array  # (num_islands, num_params, num_params), scores times scores
    curvature: Array  # (num_islands, num_params, num_params)


def moments(
    potential_fn: Potential, params: Array, weight: Array, position: Array, shift: Array
) -> Moments:
    """Average the scores, their squares and the second derivatives over each island.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    position
        (num_islands, num_particles, dim)
    shift
        How the particles of an island follow the parameters, (num_islands, dim, num_params).
    """
    ones = jnp.ones(weight.shape[0], position.dtype)
    found, _ = smc.evaluate(potential_fn, Target(params, ones), position, each=True)
    scores = found.scores - jnp.einsum("jnd,jdp->jnp", found.gradient, shift)
    scores = jnp.where(weight[..., None] > 0, scores, 0.0)

    def mean_potential(values: Array, w: Array, x: Array, b: Array) -> Array:
        followed = x - b @ (values - params)
        potential = jax.vmap(potential_fn, (None, None, 0))(values, ones[0], followed)
        return jnp.sum(jnp.where(w > 0, w * potential, 0.0))

    def slopes(values: Array) -> Array:
        each = jax.vmap(jax.grad(mean_potential), (None, 0, 0, 0))
        return each(values, weight, position, shift)

    # One direction at a time: no more memory than a step takes.
    curvature = lax.map(
        lambda direction: jax.jvp(slopes, (params,), (direction,))[1],
        jnp.eye(params.size, dtype=params.dtype),
    )
    return Moments(
        jnp.einsum("jn,jnp->jp", weight, scores),
        jnp.einsum("jn,jnp,jnq->jpq", weight, scores, scores),
        jnp.swapaxes(curvature, 0, 1),
    )


class Information(NamedTuple):
    """Score and information of the log-likelihood at the estimate, unconstrained.

    observed
        The observed information.
    observed_se
        Its Monte Carlo standard error, from the islands.
    """

    score: np.ndarray  # (num_params,)
    observed: np.ndarray  # (num_params, num_params)
    observed_se: np.ndarray  # (num_params, num_params)


def combine(all_moments: list[Moments]) -> Information:
    """Put the moments of several clouds at rest together by Louis's identity."""
    score, outer, curvature = (
        np.mean(np.asarray(parts, np.float64), axis=0)
        for parts in zip(*all_moments, strict=True)
    )
    mean = score.mean(0)
    cross = score[:, :, None] * mean
    covariance = outer - cross - np.swapaxes(cross, 1, 2) + np.outer(mean, mean)
    observed = curvature - covariance
    observed = (observed + np.swapaxes(observed, 1, 2)) / 2
    error = np.full_like(observed[0], np.nan)
    if len(observed) > 1:
        error = observed.std(0, ddof=1) / np.sqrt(len(observed))
    return Information(mean, observed.mean(0), error)


class Uncertainty(NamedTuple):
    """How well the parameters are known, on the unconstrained scale.

    covariance
        Of the estimate; rows and columns of parameters that are not known are NaN.
    known
        Parameters of which the data say something. The others are held fixed.
    shortfall
        Nats between the log-likelihood at the estimate and at the maximum.
    """

    covariance: np.ndarray  # (num_params, num_params)
    known: np.ndarray  # (num_params,)
    shortfall: float


def invert(information: Information, is_free: np.ndarray) -> Uncertainty:
    """Invert the information about the parameters of which there is any."""
    observed = information.observed
    size, noise = np.diag(observed), np.nan_to_num(np.diag(information.observed_se))
    known = np.isfinite(size) & (size > np.where(is_free, 0.0, _LEAST)) & (size > 2 * noise)
    while known.any():
        block = observed[np.ix_(known, known)]
        scale = np.sqrt(np.diag(block))
        values, vectors = np.linalg.eigh(block / np.outer(scale, scale))
        if values[0] > 1e-6:
            break
        # Leave out the parameter that the flattest direction is most about.
        known[np.flatnonzero(known)[np.argmax(np.abs(vectors[:, 0]))]] = False
    covariance = np.full_like(observed, np.nan)
    shortfall = 0.0
    if known.any():
        inverse = np.linalg.inv(observed[np.ix_(known, known)])
        covariance[np.ix_(known, known)] = inverse
        score = information.score[known]
        shortfall = float(0.5 * score @ inverse @ score)
    return Uncertainty(covariance, known, shortfall)
