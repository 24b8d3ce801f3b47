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

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala._typing import Array, Potential
from numpyro_jala.backend import blocks
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import evaluation, flow, transport
from numpyro_jala.engine.curvature import second_derivative
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.partition import Partition

#: With less information than this on an unconstrained scale a parameter is known up to
#: a factor of ten at best: for all that the data say it is at the edge of its support.
LEAST = 0.5
#: Least eigenvalue of the scores' correlation at which they tell params apart.
_COLLINEAR = 1e-3
#: Share of the information that is more than a difference of two good estimates.
_BIASED = 0.05


class Moments(NamedTuple):
    """Expectations under the weights of each island.

    Scores are of each component, the others are summed over components.
    """

    score: Array  # (num_islands, components, num_params)
    outer: Array  # (num_islands, num_params, num_params), scores times scores
    curvature: Array  # (num_islands, num_params, num_params)
    motion: Array  # (num_params, dim), of the components' centres as they follow


class Question(NamedTuple):
    """What is asked of a cloud, and how its particles may follow the parameters.

    most_dense
        Size of the largest component whose coordinates are related as they follow.
    follows
        Whether the particles follow the parameters at all.
    block
        How many particles of an island to evaluate at a time, None for all.
    """

    potential_fn: Potential
    partition: Partition
    params: Array  # (num_params,)
    most_dense: int
    follows: Array  # ()
    block: int | None = None


def _follow(
    question: Question, weight: Array, position: Array
) -> tuple[list[flow.Frame], list[flow.Flow], Array]:
    """Return how the particles follow each parameter, and the scores if they do.

    Frames and flows are of each block of components.
    """
    potential_fn, partition, params, most_dense = question[:4]
    target = Target(params, jnp.ones(weight.shape[:2], position.dtype))
    gradient, scores = _derive(question, target, position)
    alive = weight[..., None] > 0
    here = partition.spread(jnp.swapaxes(weight > 0, 1, 2))
    weights, xs = partition.of_block(weight), partition.split(position)
    gradients = partition.split(jnp.where(here, gradient, 0.0))
    parts = list(zip(weights, xs, gradients, strict=True))
    frames = [
        flow.frame(*part, padding, most_dense)
        for part, padding in zip(parts, partition.padding, strict=True)
    ]

    def follow_one(inputs: tuple[Array, Array]) -> tuple[list[flow.Flow], Array]:
        direction, score = inputs
        change = evaluation.change_gradient(
            potential_fn, partition, target, direction, position, question.block
        )
        changes = partition.split(jnp.where(here, change, 0.0))
        scores, flows = partition.of_block(score), []
        for frame, (w, x, _), c, s in zip(frames, parts, changes, scores, strict=True):
            by_scores = flow.change_by_scores(frame, w, x, s)
            flows.append([flow.follow(frame, w, x, c, mean) for mean in (None, by_scores)])
        tried = [
            (learned, _saved(frames, learned, parts))
            for learned in zip(*flows, strict=True)
        ]
        return _where_it_helps(question, weight, score, tried)

    # One direction at a time, here and below: no more memory than a step takes.
    directions = jnp.eye(params.size, dtype=params.dtype)
    scores = jnp.moveaxis(jnp.where(alive, scores, 0.0), -1, 0)
    flows, scores = lax.map(follow_one, (directions, scores))
    return frames, flows, jnp.where(alive, jnp.moveaxis(scores, 0, -1), 0.0)


def _derive(question: Question, target: Target, position: Array) -> tuple[Array, Array]:
    """Return gradients and scores of particles."""
    potential_fn, partition, block = *question[:2], question.block
    at_once = partition.is_joint
    found, _ = evaluation.evaluate_model(
        potential_fn, partition, target, position, True, at_once, block=block
    )
    if at_once:
        return found.gradient, found.scores
    scores = evaluation.evaluate_scores(potential_fn, target, position, block)[1]
    return found.gradient, scores


def _where_it_helps(
    question: Question,
    weight: Array,
    score: Array,
    tried: list[tuple[tuple[flow.Flow, ...], Array]],
) -> tuple[list[flow.Flow], Array]:
    """Follow a parameter in each component by the flow that leaves the least noise, if any.

    Parameters
    ----------
    tried
        Flows of all blocks, and the part of the scores that they save.
    """
    kept, following = jax.tree.map(jnp.zeros_like, list(tried[0][0])), score
    for learned, saved in tried:
        # This is false for NaN as well.
        both = jnp.stack([score - saved, following], -1)
        spread = transport.variance(weight, both)
        helps = question.follows & (spread[:, 0] < spread[:, 1])
        helps &= transport.is_centred(weight, saved[..., None])[:, 0]
        by_block = question.partition.of_block(helps[None])
        kept = [
            jax.tree.map(partial(_choose, by[0]), new, old)
            for by, new, old in zip(by_block, learned, kept, strict=True)
        ]
        following = jnp.where(helps[:, None], both[..., 0], following)
    return kept, following


def _choose(mask: Array, new: Array, old: Array) -> Array:
    """Take the components (second axis) of a mask from one array, and the others of another."""
    return jnp.where(mask.reshape(-1, *(1,) * (new.ndim - 2)), new, old)


def _saved(
    frames: list[flow.Frame],
    flows: tuple[flow.Flow, ...],
    parts: list[tuple[Array, Array, Array]],
) -> Array:
    """Return the part of the scores that following saves, (num_islands, components, ...)."""
    each = zip(frames, flows, parts, strict=True)
    return jnp.concatenate([flow.rate(f, by, x, g) for f, by, (_, x, g) in each], 1)


def moments(question: Question, weight: Array, position: Array) -> Moments:
    """Average the scores, their squares and the second derivatives over each island.

    Parameters
    ----------
    weight
        Normalised in islands and components, (num_islands, components, num_particles).
    position
        Of particles at the parameters, (num_islands, num_particles, dim).
    """
    frames, flows, scores = _follow(question, weight, position)
    potential_fn, partition, params = question[:3]
    target = Target(params, jnp.ones(weight.shape[:2], position.dtype))

    def motion(directions: Array, x: Array) -> Array:
        moves = []
        for frame, each, own in zip(frames, flows, partition.split(x), strict=True):
            together = jax.tree.map(
                lambda leaf: jnp.einsum("jp,pj...->j...", directions, leaf), each
            )
            moves.append(-flow.displace(frame, together, own))
        return partition.join(moves)

    of_block = partial(second_derivative, potential_fn, target, motion)
    by_particle = jnp.swapaxes(weight, 1, 2)
    curvature = blocks.total(of_block, question.block, by_particle, position)
    # An island without living particles has no moments.
    nothing = jnp.where(weight.sum(-1) > 0, 0.0, jnp.nan)[..., None]
    shifts = [jnp.moveaxis(each.shift.mean(1), 0, 1) for each in flows]
    return Moments(
        nothing + jnp.einsum("jcn,jcnp->jcp", weight, scores),
        jnp.einsum("jcn,jcnp,jcnq->jpq", weight, scores, scores),
        curvature + sum(map(flow.volume_curvature, flows)),
        -partition.join(shifts),
    )


class Information(NamedTuple):
    """Score and information of the log-likelihood at the estimate, unconstrained.

    score_noise
        Monte Carlo covariance of the score, from the islands.
    islands
        What each island alone says of the observed information.
    by_component
        The score of each component by each island, of the potential.
    motion
        How the components' centres follow the parameters.
    """

    score: np.ndarray  # (num_params,)
    score_noise: np.ndarray  # (num_params, num_params)
    islands: np.ndarray  # (num_islands, num_params, num_params)
    by_component: Array | np.ndarray | None = None  # (num_islands, components, num_params)
    motion: Array | None = None  # (num_params, dim)

    @property
    def observed(self) -> np.ndarray:
        """The observed information, (num_params, num_params)."""
        return np.asarray(self.islands.mean(0))

    @property
    def observed_se(self) -> np.ndarray:
        """Its Monte Carlo standard error, NaN where one island alone tells it."""
        return _error_of_mean(self.islands)


class _Products(NamedTuple):
    """Scores of components, the islands that have all of them, and sums over components."""

    score: Array  # (num_islands, components, num_params)
    known: Array  # (num_islands,)
    mean: Array  # (num_params,)
    square: Array  # (num_params, num_params), of the mean
    cross: Array  # (num_islands, num_params, num_params), islands less mean times mean
    spread: Array  # (num_params, num_params), islands less mean, squared


@jax.jit
def _multiply(scores: list[Array], alive: Array) -> _Products:
    """Average the scores of some clouds, and multiply those of some islands.

    On the device where they are: they may be millions.
    """
    score = sum(scores[1:], scores[0]) / len(scores)
    known = jnp.isfinite(score).all((1, 2))
    alive = alive & known
    here = alive[:, None, None]
    mean = jnp.sum(jnp.where(here, score, 0.0), 0) / alive.sum()
    apart = jnp.where(here, score - mean, 0.0)
    exact = lax.Precision.HIGHEST
    return _Products(
        score,
        known,
        mean.sum(0),
        jnp.matmul(mean.T, mean, precision=exact),
        jnp.einsum("jcp,cq->jpq", apart, mean, precision=exact),
        jnp.einsum("jcp,jcq->pq", apart, apart, precision=exact),
    )


def combine(all_moments: list[Moments]) -> Information:
    """Put the moments of several clouds together by Louis's identity.

    Of a mean of few particles the square is high by its noise, which the islands show.
    """
    scores, *small, _ = zip(*all_moments, strict=True)
    outer, curvature = (np.asarray(fetch(each), np.float64).mean(0) for each in small)
    alive = np.isfinite(outer + curvature).all((1, 2))
    score, known, *products = _multiply(list(scores), alive)
    mean, square, cross, spread = (np.asarray(p, np.float64) for p in fetch(products))
    known = np.asarray(fetch(known))
    alive = alive & known
    if not alive.any():
        nan = np.full_like(outer[0], np.nan)
        return Information(nan[0], nan, nan[None], score[known] if known.any() else None)
    num_islands = int(alive.sum())
    covariance = outer - cross - np.swapaxes(cross, 1, 2) - square
    noise = spread / max(num_islands - 1, 1) / num_islands
    observed = (curvature - covariance - noise)[alive]
    observed = (observed + np.swapaxes(observed, 1, 2)) / 2
    if num_islands == 1:
        noise = np.full_like(noise, np.nan)
    return Information(mean, noise, observed, score if alive.all() else score[alive])


def _error_of_mean(rows: np.ndarray) -> np.ndarray:
    """Return the standard error of a mean over rows, NaN of one row."""
    if len(rows) == 1:
        return np.full(rows.shape[1:], np.nan)
    return np.asarray(rows.std(0, ddof=1) / np.sqrt(len(rows)))


def influence(scores: Array | np.ndarray, covariance: np.ndarray) -> np.ndarray:
    r"""Return for each component what its data owe to the parameters that they helped find.

    To first order the maximum of the others is off by :math:`I^{-1} s` with the component's
    score :math:`s`, which costs its log-likelihood :math:`s^\top I^{-1} s`.

    Parameters
    ----------
    scores
        By each island, (num_islands, components, num_params). Products of different
        islands have no bias from their noise.
    covariance
        :math:`I^{-1}`; NaN for parameters that are held fixed.
    """
    known, num_islands = np.nan_to_num(covariance), len(scores)
    scores = np.asarray(fetch(scores))

    def square(score: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.einsum("cp,cp->c", score @ known, score)
        return found

    squares = square(scores.sum(0))
    if num_islands == 1:
        return squares
    own = np.add.reduce([square(score) for score in scores])
    return np.asarray((squares - own) / (num_islands * (num_islands - 1)))


def from_scores(information: Information) -> np.ndarray | None:
    """Return a covariance of the estimate by the spread of the components' scores.

    It needs no second derivative, and is rough. None where scores tell nothing of some
    parameter.
    """
    if information.by_component is None:
        return None
    score = np.asarray(information.by_component.mean(0), np.float64)
    size = np.sqrt(np.sum(score**2, 0))
    if not np.all(size**2 > LEAST):
        return None
    correlation = score.T @ score / np.outer(size, size)
    if not np.linalg.eigvalsh(correlation)[0] > _COLLINEAR:
        return None
    return np.linalg.inv(correlation) / np.outer(size, size)


def is_biased(second_derivatives: Information, differences: Information) -> bool:
    """Tell whether second derivatives miss a part of the information beyond the noise.

    They do where a density has kinks, as that of Laplace: there they are zero.
    """
    one, other = (np.diag(each.observed) for each in (second_derivatives, differences))
    errors = [np.diag(each.observed_se) for each in (second_derivatives, differences)]
    apart = np.abs(one - other)
    return bool(np.any((apart > 4 * np.hypot(*errors)) & (apart > _BIASED * np.abs(other))))


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
    error
        Monte Carlo error of each standard error, as a share of it.
    """

    covariance: np.ndarray  # (num_params, num_params)
    determined: np.ndarray  # (num_params,)
    newton_decrement: np.ndarray  # (num_params,)
    shortfall: float
    error: np.ndarray  # (num_params,)


def invert(information: Information, is_free: np.ndarray) -> Uncertainty:
    """Invert the information about the parameters of which there is any.

    Where that about a combination of several is no more than noise, one of them is left
    out: as for a parameter alone, its inverse would be any number.
    """
    observed = information.observed
    size, noise = np.diag(observed), np.nan_to_num(np.diag(information.observed_se))
    known = np.isfinite(size) & (size > np.where(is_free, 0.0, LEAST)) & (size > 2 * noise)
    while known.any():
        block = observed[np.ix_(known, known)]
        scale = np.sqrt(np.diag(block))
        values, vectors = np.linalg.eigh(block / np.outer(scale, scale))
        flattest = np.zeros(len(observed))
        flattest[known] = vectors[:, 0] / scale
        noise = _error_of_mean(information.islands @ flattest @ flattest)
        if values[0] > max(1e-6, 2 * np.nan_to_num(noise)):
            break
        # Leave out the parameter that the flattest direction is most about.
        known[np.flatnonzero(known)[np.argmax(np.abs(vectors[:, 0]))]] = False
    covariance = np.full_like(observed, np.nan)
    loud = np.abs(information.score) > 3 * np.sqrt(np.diag(information.score_noise))
    least = np.maximum(np.abs(size), LEAST)
    newton_decrement = np.where(loud & ~known, 0.5 * information.score**2 / least, 0.0)
    shortfall = float(newton_decrement.sum())
    if known.any():
        inverse = np.linalg.inv(observed[np.ix_(known, known)])
        covariance[np.ix_(known, known)] = inverse
        score = information.score[known]
        shortfall += float(0.5 * score @ inverse @ score)
    error = _error_of_errors(information, covariance)
    return Uncertainty(covariance, known, newton_decrement, shortfall, error)


def _error_of_errors(information: Information, covariance: np.ndarray) -> np.ndarray:
    """Return the relative Monte Carlo error of standard errors, to first order."""
    known = np.nan_to_num(covariance)
    change = np.einsum("pi,jiq,qp->jp", known, information.islands, known)
    return _error_of_mean(change) / (2 * np.diag(covariance))


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
