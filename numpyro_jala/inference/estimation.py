"""The compiled parts of what is found at the estimate: evidence, score, information.

Each is compiled once for a :class:`Fixed` problem and the shapes of its data.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp

from numpyro_jala._typing import Array, Potential, PRNGKey
from numpyro_jala.backend import blocks, compilation
from numpyro_jala.backend.innermost import over_particles
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import on_mesh, share, spread
from numpyro_jala.engine import evaluation, smc
from numpyro_jala.engine.evaluation import FEW_DIRECTIONS, Target
from numpyro_jala.engine.resampling import systematic
from numpyro_jala.engine.weights import log_mean_exp, normalise
from numpyro_jala.inference import evidence, importance, programs
from numpyro_jala.inference.draws import Draws
from numpyro_jala.inference.evidence import Bridge, Gaussian
from numpyro_jala.inference.importance import Importance, Sums
from numpyro_jala.inference.information import Moments, Question, moments
from numpyro_jala.inference.programs import CLOUDS, Data, Fixed
from numpyro_jala.inference.snapshots import Snapshot, Together, put_together


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def fit_loo(fixed: Fixed, clouds: list[Snapshot]) -> tuple[Gaussian, Array]:
    """Fit a Gaussian for each island and component on the other islands' particles.

    Also returns the lowest potential of each component: differences to it have more
    digits.
    """
    cloud, partition = put_together(clouds), fixed.layout.partition
    most_dense = fixed.settings.most_dense or 0
    # For importance sampling, of several components, by the particles' covariance: it is
    # wider than the inverse of their curvature where tails are heavy.
    gaussian = evidence.fit_loo(*cloud[:2], cloud.gradient, partition, most_dense)
    level = jnp.min(jnp.where(cloud.weight > 0, cloud.potential, jnp.inf), (0, 2))
    return gaussian, share(level)


def evaluate_draws(fixed: Fixed, data: Data, params: Array, draws: Array) -> Array:
    """Return the potentials (num_islands, components, num_draws) of the posterior."""
    potential_fn = programs.potential_at(fixed, data, params)
    ones = jnp.ones((fixed.layout.partition.num_components,), draws.dtype)
    each = over_particles(partial(potential_fn, params, ones))
    found = jnp.swapaxes(blocks.over(each, programs.block_size(fixed), draws), 1, 2)
    return jnp.where(jnp.isfinite(found), found, jnp.inf)


#: Particles of an island that tell by how much two programs round differently.
_NUM_ALIKE = 32


def num_for_draws(fixed: Fixed) -> int:
    """Return how often the model is evaluated for as many draws as clouds have particles."""
    num_islands, size = fixed.settings.num_islands, CLOUDS * fixed.settings.num_particles
    return num_islands * (size + min(_NUM_ALIKE, size))


def log_joint_of_draws(
    fixed: Fixed, data: Data, params: Array, cloud: Together, draws: Array, level: Array
) -> Array:
    """Return ``level`` less the potentials of one component's draws, (islands, draws).

    Rounded as the particles' are: where large terms cancel, as those of large counts do, the
    programs of a version of XLA were seen to differ by 0.19 nats, the same at all positions.
    """
    few = min(_NUM_ALIKE, cloud.position.shape[1])
    positions = jnp.concatenate([cloud.position[:, :few], draws], 1)
    found = evaluate_draws(fixed, data, params, positions)[:, 0]
    change = cloud.potential[:, 0, :few] - found[:, :few]
    known = (cloud.weight[:, 0, :few] > 0) & jnp.isfinite(change)
    offset = jnp.sum(jnp.where(known, change, 0.0)) / jnp.maximum(known.sum(), 1)
    return level - found[:, few:] - offset


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def bridge_to(
    fixed: Fixed,
    rng_key: PRNGKey,
    data: Data,
    params: Array,
    clouds: list[Snapshot],
    gaussian: Gaussian,
    level: Array,
) -> Bridge:
    """Estimate the evidence of one component by a bridge to its Gaussians."""
    cloud, partition = put_together(clouds), fixed.layout.partition
    draws, at_particles, at_draws = evidence.draw_loo(
        rng_key, gaussian, partition, cloud.position
    )
    log_joint = log_joint_of_draws(fixed, data, params, cloud, draws, level)
    at_particles = (level - cloud.potential - at_particles)[:, 0]
    at_draws = log_joint - at_draws[:, 0]
    return share(evidence.bridge(cloud.weight[:, 0], at_particles, at_draws))


def _of_block(
    fixed: Fixed, draws: Draws, function: Callable[[Array, Array], Any]
) -> Callable[[Array], Any]:
    """Return what ``function(position, level - log_density)`` is of a block's points."""
    partition, proposal = fixed.layout.partition, draws.proposal
    shifts = importance.draw_shifts(draws.rng_key, proposal, partition)

    def one(points: Array) -> Any:
        position, log_density = importance.draw(shifts, proposal, partition, points)
        return function(position, draws.level[:, None] - log_density)

    return one


def _over_blocks(
    fixed: Fixed, draws: Draws, function: Callable[[Array, Array], Array]
) -> Array:
    """Apply ``function(position, level - log_density)`` to each block of draws."""
    found: Array = lax.map(_of_block(fixed, draws, function), jnp.asarray(draws.points))
    return found


def _fold(
    fixed: Fixed,
    draws: Draws,
    function: Callable[[Array, Array], Any],
    merge: Callable[[Any, Any], Any],
    nothing: Any,
) -> Any:
    """Merge ``function(position, level - log_density)`` of the blocks that serve for sums."""
    one, points = _of_block(fixed, draws, function), jnp.asarray(draws.points)

    def add(index: Array, found: Any) -> Any:
        return merge(found, one(points[index]))

    return lax.fori_loop(0, draws.num_blocks, add, nothing)


def _sum_up(
    fixed: Fixed, draws: Draws, function: Callable[[Array, Array], Sums], num_columns: int
) -> Sums:
    """Add up weights, and average so many columns by them."""
    shape = fixed.settings.num_islands, fixed.layout.partition.num_components
    least = jnp.full(shape, -jnp.inf, draws.level.dtype)
    mean = jnp.zeros((*shape, num_columns), draws.level.dtype)
    nothing = Sums(least, least, mean)
    found: Sums = _fold(fixed, draws, function, importance.merge, nothing)
    return found


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def sample(
    fixed: Fixed, data: Data, params: Array, draws: Draws, clouds: list[Snapshot]
) -> Importance:
    """Estimate the evidence of each component by importance sampling.

    Components that are not small by a bridge between these draws and the particles.
    """
    partition = fixed.layout.partition

    def log_ratios(position: Array, log_base: Array) -> Array:
        return log_base - evaluate_draws(fixed, data, params, position)

    if partition.has_small_components:

        def weigh_only(position: Array, log_base: Array) -> Sums:
            return importance.sums(log_ratios(position, log_base))

        summed = _sum_up(fixed, draws, weigh_only, 0)
        return share(importance.estimate(summed, draws.num_draws))
    every = _over_blocks(fixed, draws, log_ratios)
    at_draws = jnp.moveaxis(every, 0, 2).reshape(*every.shape[1:3], -1)
    found = importance.estimate(importance.sums(at_draws), draws.num_draws)
    cloud = put_together(clouds)
    log_density = importance.log_density(draws.proposal, partition, cloud.position)
    at_particles = draws.level[:, None] - cloud.potential - log_density
    second = importance.bridged(found, cloud.weight, at_particles, at_draws)
    return share(importance.choose(~partition.is_small, found, second))


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def log_weights(
    fixed: Fixed, data: Data, params: Array, draws: Draws, component: Array
) -> Array:
    """Return the log-weights of one component's draws, in blocks."""

    def one(position: Array, log_base: Array) -> Array:
        return (log_base - evaluate_draws(fixed, data, params, position))[:, component]

    return share(_over_blocks(fixed, draws, one))


class Weighted(NamedTuple):
    """Draws, and their weights in each component: log-ratios of target to proposal."""

    position: Array  # (num_islands, num_draws, dim)
    potential: Array  # (num_islands, components, num_draws)
    log_weight: Array  # (num_islands, components, num_draws)


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def weigh(fixed: Fixed, data: Data, params: Array, draws: Draws) -> Weighted:
    """Draw all at once, and weigh the draws."""
    partition = fixed.layout.partition
    shifts = importance.draw_shifts(draws.rng_key, draws.proposal, partition)
    points = jnp.asarray(draws.points).reshape(-1, draws.points.shape[-1])
    position, log_density = importance.draw(shifts, draws.proposal, partition, points)
    potential = evaluate_draws(fixed, data, params, position)
    log_weight = draws.level[:, None] - potential - log_density
    return spread(Weighted(position, potential, log_weight))


@compilation.program(static_argnums=0)
@on_mesh
def redraw(fixed: Fixed, rng_key: PRNGKey, drawn: Weighted, cloud: smc.Cloud) -> smc.Cloud:
    """Replace particles by draws, resampled to as many, each component apart."""
    partition = fixed.layout.partition
    num_particles = cloud.log_weight.shape[-1]

    def pick(key: PRNGKey, own_weight: Array) -> Array:
        if partition.is_joint:
            return systematic(key, own_weight, num_particles)
        # Components share one sequence of points: in that order they would be dependent.
        draw_key, order_key = random.split(key)
        return random.permutation(
            order_key, systematic(draw_key, own_weight, num_particles)
        )

    keys = random.split(rng_key, drawn.log_weight.shape[:2])
    ancestors = jax.vmap(jax.vmap(pick))(keys, drawn.log_weight)
    rows = partition.spread(jnp.swapaxes(ancestors, 1, 2))
    return spread(
        cloud._replace(
            position=jnp.take_along_axis(drawn.position, rows, 1),
            potential=jnp.take_along_axis(drawn.potential, ancestors, 2),
            log_weight=jnp.zeros_like(cloud.log_weight),
        )
    )


class Score(NamedTuple):
    """The log-likelihood at some parameters and its slope, by importance sampling.

    The same draws serve all parameters, and move with them, so that this is one smooth
    function of them.
    """

    log_evidence: Array  # (components,), less the level
    score: Array  # (num_islands, num_params), of the potential
    ess: Array  # (), the lowest of all components, as a share
    rounding: Array  # (), of the sum of the log-evidence: that of potentials


def _rounding(potential: Array) -> Array:
    """Return what one rounding of each component's potential (components,) sums up to."""
    return np.finfo(potential.dtype).eps * jnp.linalg.norm(potential)


def _weigh_each(
    block: int | None,
    potential_fn: Potential,
    target: Target,
    position: Array,
    log_base: Array,
) -> Sums:
    """Sum the weights of draws, and average their scores by them, in forward mode."""
    potential, scores = evaluation.evaluate_scores(potential_fn, target, position, block)
    # Far out, where a draw weighs nothing, its derivatives may not be finite.
    usable = jnp.isfinite(potential) & jnp.isfinite(scores).all(-1)
    log_ratio = jnp.where(usable, log_base - potential, -jnp.inf)
    return importance.sums(log_ratio, jnp.where(usable[..., None], scores, 0.0))


def _weigh_all(
    potential_fn: Potential, target: Target, position: Array, log_base: Array
) -> Array:
    """Sum the scores of draws by their weights in reverse mode: (num_islands, num_params)."""

    def of_island(heat: Array, x: Array, base: Array) -> Array:
        def potentials(values: Array) -> Array:
            return jax.vmap(partial(potential_fn, values, heat))(x).T

        potential, pull = jax.vjp(potentials, target.params)
        weight = jnp.where(jnp.isfinite(potential), jnp.exp(base - potential), 0.0)
        return pull(weight)[0]

    return jax.vmap(of_island)(target.temperature, position, log_base)


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def score(fixed: Fixed, data: Data, params: Array, draws: Draws) -> Score:
    """Find the score of the marginal likelihood by importance sampling.

    Of few parameters in one pass in forward mode; of many in reverse mode, which has to
    know the weights, in a second one.
    """
    draws = draws.at(params)
    potential_fn = draws.following(fixed.layout.potential(data.arrays, data.tables))
    shape = (fixed.settings.num_islands, fixed.layout.partition.num_components)
    target, in_one_pass = (
        Target(params, jnp.ones(shape, params.dtype)),
        params.size <= FEW_DIRECTIONS,
    )
    weigh_each = partial(_weigh_each, programs.block_size(fixed), potential_fn, target)

    def weigh_only(position: Array, log_base: Array) -> Sums:
        return importance.sums(log_base - evaluate_draws(fixed, data, params, position))

    num_columns = params.size if in_one_pass else 0
    sums = _sum_up(fixed, draws, weigh_each if in_one_pass else weigh_only, num_columns)
    found = importance.estimate(sums, draws.num_draws)
    # Weights are normalised by all islands: a ratio of few draws would be biased, and what
    # is left of the information after the latents' share is small beside it.
    pooled = log_mean_exp(found.islands.T)

    def weigh_again(position: Array, log_base: Array) -> Array:
        log_base = log_base - pooled[:, None]
        return _weigh_all(potential_fn, target, position, log_base) / draws.num_draws

    if in_one_pass:
        share_of = jnp.exp(found.islands - pooled)
        score_of = jnp.einsum("ic,icp->ip", share_of, sums.mean)
    else:
        nothing = jnp.zeros((shape[0], params.size), params.dtype)
        score_of = _fold(fixed, draws, weigh_again, jnp.add, nothing)
    lost = _rounding(draws.level)
    return share(Score(found.log_evidence, score_of, found.ess.min(), lost))


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def score_of_particles(fixed: Fixed, data: Data, params: Array, cloud: Snapshot) -> Score:
    """Find the score of the marginal likelihood on particles at rest nearby."""
    target = Target(params, jnp.ones(cloud.log_weight.shape[:2], params.dtype))
    potential_fn, block = (
        programs.potential_at(fixed, data, params),
        programs.block_size(fixed),
    )
    potential, scores = evaluation.evaluate_scores(
        potential_fn, target, cloud.position, block
    )
    log_weight = jnp.log(normalise(cloud.log_weight))
    change = cloud.potential - potential
    alive = jnp.isfinite(log_weight) & jnp.isfinite(change)
    own, squares = (
        logsumexp(jnp.where(alive, log_weight + power * change, -jnp.inf), -1)
        for power in (1, 2)
    )
    pooled = log_mean_exp(own.T)
    weight = jnp.where(alive, jnp.exp(log_weight + change - pooled[:, None]), 0.0)
    scores = jnp.where(alive[..., None], scores, 0.0)
    summed = jnp.einsum("jcn,jcnp->jp", weight, scores)
    ess = jnp.exp(2 * pooled - log_mean_exp(squares.T))
    lost = _rounding(jnp.max(jnp.where(alive, jnp.abs(potential), 0.0), (0, 2)))
    return share(Score(pooled, summed, ess.min(), lost))


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def louis(
    fixed: Fixed, data: Data, params: Array, cloud: Snapshot, follows: Array
) -> Moments:
    """Average over one cloud at rest what the information about the parameters needs."""
    layout, most_dense = fixed.layout, fixed.settings.most_dense or 0
    potential_fn = layout.potential(data.arrays, data.tables)
    block, as_usual = programs.block_size(fixed), fixed.settings.num_particles
    if block is None and cloud.position.shape[1] > as_usual:
        block = as_usual  # no more memory than a step takes
    question = Question(potential_fn, layout.partition, params, most_dense, follows, block)
    return share(moments(question, normalise(cloud.log_weight), cloud.position))
