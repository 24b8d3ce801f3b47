r"""What the data say about the parameters, from particles at rest.

The score and the information of the marginal likelihood are expectations under the
posterior (Louis 1982),

.. math::

    g = E[\nabla U], \qquad I = E[\nabla^2 U] - \mathrm{Cov}[\nabla U],

with derivatives in the parameters :math:`\theta`. Both hold for any potential with the
same marginal, and so for that of particles which follow the parameters with a flow that
is fixed before: this makes both terms of :math:`I` small, and their difference precise.
Where the posterior is Gaussian the score is then the same for all particles, and exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala._typing import Array, Potential
from numpyro_jala.engine import flow, smc, transport
from numpyro_jala.engine.smc import Target

#: With less information than this on an unconstrained scale a parameter is known up to
#: a factor of ten at best: for all that the data say it is at the edge of its support.
_LEAST = 0.5


class Moments(NamedTuple):
    """Expectations under the weights of each island."""

    score: Array  # (num_islands, num_params)
    outer: Array  # (num_islands, num_params, num_params), scores times scores
    curvature: Array  # (num_islands, num_params, num_params)


def _follow(
    potential_fn: Potential,
    params: Array,
    weight: Array,
    position: Array,
    dense: bool,
    follows: Array,
) -> tuple[flow.Frame, flow.Flow, Array]:
    """Return how the particles follow each parameter, and the scores if they do."""
    ones = jnp.ones(weight.shape[0], position.dtype)
    found, _ = smc.evaluate_model(potential_fn, Target(params, ones), position, each=True)
    alive = weight[..., None] > 0
    gradient = jnp.where(alive, found.gradient, 0.0)
    frame = flow.frame(weight, position, gradient, dense)

    def gradients(values: Array) -> Array:
        rows = jax.vmap(jax.grad(potential_fn, 2), (None, None, 0))
        return jax.vmap(rows, (None, None, 0))(values, ones[0], position)

    def follow_one(inputs: tuple[Array, Array]) -> tuple[flow.Flow, Array]:
        direction, score = inputs
        change = jax.jvp(gradients, (params,), (direction,))[1]
        learned = flow.follow(frame, weight, position, jnp.where(alive, change, 0.0))
        saved = jax.vmap(flow.rate)(frame, learned, position, gradient)
        following = score - saved
        # Only where it saves more than it costs. This is false for NaN as well.
        spread = transport.variance(weight, jnp.stack([following, score], -1))
        helps = follows & (spread[0] < spread[1])
        helps &= transport.is_centred(weight, saved[..., None])[0]
        kept = jax.tree.map(lambda leaf: jnp.where(helps, leaf, 0.0), learned)
        return kept, jnp.where(helps, following, score)

    # One direction at a time, here and below: no more memory than a step takes.
    directions = jnp.eye(params.size, dtype=params.dtype)
    scores = jnp.moveaxis(jnp.where(alive, found.scores, 0.0), -1, 0)
    flows, scores = lax.map(follow_one, (directions, scores))
    return frame, flows, jnp.where(alive, jnp.moveaxis(scores, 0, -1), 0.0)


def moments(
    potential_fn: Potential,
    params: Array,
    weight: Array,
    position: Array,
    dense: bool,
    follows: Array,
) -> Moments:
    """Average the scores, their squares and the second derivatives over each island.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    position
        (num_islands, num_particles, dim)
    dense
        Whether the coordinates are related to each other as they follow the parameters.
    follows
        Whether the particles follow the parameters at all.
    """
    frame, flows, scores = _follow(potential_fn, params, weight, position, dense, follows)
    one = jnp.ones((), position.dtype)

    def mean_potential(
        values: Array, w: Array, x: Array, own_frame: flow.Frame, own_flows: flow.Flow
    ) -> Array:
        change = values - params
        total = jax.tree.map(lambda leaf: jnp.tensordot(change, leaf, 1), own_flows)
        followed = x - flow.displace(own_frame, total, x)
        potential = jax.vmap(potential_fn, (None, None, 0))(values, one, followed)
        return jnp.sum(jnp.where(w > 0, w * potential, 0.0))

    def slopes(values: Array) -> Array:
        each = jax.vmap(jax.grad(mean_potential), (None, 0, 0, 0, 1))
        return each(values, weight, position, frame, flows)

    def curvature_along(direction: Array) -> Array:
        return jax.jvp(slopes, (params,), (direction,))[1]

    curvature = lax.map(curvature_along, jnp.eye(params.size, dtype=params.dtype))
    # An island without living particles has no moments.
    nothing = jnp.where(weight.sum(-1) > 0, 0.0, jnp.nan)[:, None]
    return Moments(
        nothing + jnp.einsum("jn,jnp->jp", weight, scores),
        jnp.einsum("jn,jnp,jnq->jpq", weight, scores, scores),
        jnp.swapaxes(curvature, 0, 1) + flow.volume_curvature(flows),
    )


class Information(NamedTuple):
    """Score and information of the log-likelihood at the estimate, unconstrained.

    observed
        The observed information.
    score_noise, observed_se
        Monte Carlo covariance of the score and standard error of the information, from
        the islands.
    """

    score: np.ndarray  # (num_params,)
    score_noise: np.ndarray  # (num_params, num_params)
    observed: np.ndarray  # (num_params, num_params)
    observed_se: np.ndarray  # (num_params, num_params)


def combine(all_moments: list[Moments]) -> Information:
    """Put the moments of several clouds at rest together by Louis's identity."""
    score, outer, curvature = (
        np.mean(np.asarray(parts, np.float64), axis=0)
        for parts in zip(*all_moments, strict=True)
    )
    squares = np.isfinite(outer + curvature).all((1, 2))
    alive = np.isfinite(score).all(1) & squares
    if not alive.any():
        nan = np.full_like(outer[0], np.nan)
        return Information(nan[0], nan, nan, nan)
    score, outer, curvature = score[alive], outer[alive], curvature[alive]
    mean = score.mean(0)
    cross = score[:, :, None] * mean
    covariance = outer - cross - np.swapaxes(cross, 1, 2) + np.outer(mean, mean)
    observed = curvature - covariance
    observed = (observed + np.swapaxes(observed, 1, 2)) / 2
    num_islands = len(observed)
    if num_islands == 1:
        nan = np.full_like(observed[0], np.nan)
        return Information(mean, nan, observed[0], nan)
    error = observed.std(0, ddof=1) / np.sqrt(num_islands)
    noise = (score - mean).T @ (score - mean) / (num_islands * (num_islands - 1))
    return Information(mean, noise, observed.mean(0), error)


def is_quieter(first: Information, second: Information) -> bool:
    """Tell whether one information has less noise than another."""
    size = np.abs(np.diag(second.observed))
    size = np.where(size > 0, size, 1.0)
    noise = [np.sum(each.observed_se**2 / np.outer(size, size)) for each in (first, second)]
    return bool(noise[0] < noise[1])


class Uncertainty(NamedTuple):
    """How well the parameters are known, on the unconstrained scale.

    covariance
        Of the estimate; rows and columns of undetermined parameters are NaN.
    determined
        Parameters about which there is information. The others are held fixed.
    newton_decrement
        Nats that an undetermined parameter would still gain if it moved on: none at
        the edge of its support, and some where the likelihood is not concave.
    shortfall
        Nats between the log-likelihood at the estimate and at the maximum.
    """

    covariance: np.ndarray  # (num_params, num_params)
    determined: np.ndarray  # (num_params,)
    newton_decrement: np.ndarray  # (num_params,)
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
    loud = np.abs(information.score) > 3 * np.sqrt(np.diag(information.score_noise))
    least = np.maximum(np.abs(size), _LEAST)
    newton_decrement = np.where(loud & ~known, 0.5 * information.score**2 / least, 0.0)
    shortfall = float(newton_decrement.sum())
    if known.any():
        inverse = np.linalg.inv(observed[np.ix_(known, known)])
        covariance[np.ix_(known, known)] = inverse
        score = information.score[known]
        shortfall += float(0.5 * score @ inverse @ score)
    return Uncertainty(covariance, known, newton_decrement, shortfall)


def newton_step(information: Information, uncertainty: Uncertainty) -> np.ndarray:
    """Return the step to the maximum, short by the share of it that is noise.

    Of the decrement of a score, its nats to the maximum, the noise of the score makes up
    some. A full step would put the error of that noise in the place of the error that
    there is.
    """
    covariance = np.nan_to_num(uncertainty.covariance)
    noise = 0.5 * np.sum(covariance * information.score_noise)
    step = -covariance @ information.score
    decrement = -0.5 * information.score @ step
    return (1 - min(noise / max(decrement, 1e-30), 1.0)) * step
