"""The engine: carry a cloud of weighted particles to the next target."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, Potential, PRNGKey, Resampler, Tree
from numpyro_jala.backend import blocks
from numpyro_jala.backend.precision import roughly
from numpyro_jala.engine import langevin, mixture
from numpyro_jala.engine.langevin import Kernel, Move
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.weights import effective_fraction, log_mean_exp, normalise


class Target(NamedTuple):
    """A point on the path: what the potential depends on beside the particle."""

    params: Array  # (num_params,)
    temperature: Array  # (num_islands, components)


class Cloud(NamedTuple):
    """Weighted particles in islands, and the target's potential where they stand.

    position
        Unconstrained latents, one row per particle.
    momentum
        Standard normal in whitened units, and independent of the position.
    log_weight
        Unnormalised log-weights of each component since its last resampling.
    potential, gradient, slope, scores
        The potential and its derivatives with respect to the position, the temperature
        and the parameters, kept so that a step evaluates the model once.
    log_evidence
        What was settled at the resamplings; see :func:`log_evidence`.
    """

    position: Array  # (num_islands, num_particles, dim)
    momentum: Array  # (num_islands, num_particles, dim or 0)
    log_weight: Array  # (num_islands, components, num_particles)
    potential: Array  # (num_islands, components, num_particles)
    gradient: Array  # (num_islands, num_particles, dim)
    slope: Array  # (num_islands, components, num_particles)
    scores: Array  # (num_islands, components, num_particles, num_params or 0)
    log_evidence: Array  # (num_islands, components)

    @property
    def rates(self) -> Array:
        """Derivatives with respect to the temperature and the parameters, in columns."""
        return jnp.concatenate([self.slope[..., None], self.scores], -1)


class StepInfo(NamedTuple):
    """What a step did, before its resampling."""

    increment: Array  # (num_islands, components, num_particles)
    ess: Array  # (num_islands, components), a fraction
    died: Array  # (), particles that came to a non-finite potential


class Derivatives(NamedTuple):
    """A potential and its derivatives at every particle."""

    potential: Array  # (num_islands, components, num_particles)
    gradient: Array  # (num_islands, num_particles, dim)
    slope: Array  # (num_islands, components, num_particles)
    scores: Array  # (num_islands, components, num_particles, num_params or 0)


def over_islands(function: Callable[..., Any]) -> Callable[..., Any]:
    """Map over the islands.

    A compiler for CPUs shares the first axis out among the cores, so that of one island
    must not come first.
    """

    def mapped(*trees: Any) -> Any:
        if jax.tree.leaves(trees)[0].shape[0] > 1:
            return jax.vmap(function)(*trees)
        alone = function(*jax.tree.map(lambda leaf: leaf[0], trees))
        return jax.tree.map(lambda leaf: leaf[None], alone)

    return mapped


#: ``score_fn(weight)``: the weighted sum of the particles' scores, (num_params,).
ScoreFn: TypeAlias = Callable[[Array], Array]


def evaluate_model(
    potential_fn: Potential,
    partition: Partition,
    target: Target,
    position: Array,
    each: bool,
    scores_at_once: bool = True,
    rough_gradient: bool = False,
    block: int | None = None,
) -> tuple[Derivatives, ScoreFn]:
    """Evaluate the model once at every particle.

    The score of a particle is the derivative of its potential with respect to the
    parameters. With ``each`` every particle's score is kept, which is for few
    parameters, and at most ``block`` particles of an island are evaluated at a time. Unless
    ``scores_at_once`` the scores are zero here: see :func:`evaluate_scores`.
    Without ``each`` scores are only ever summed, in one pull-back of the potentials with
    the weights: memory does not grow with particles times parameters.
    """
    num_islands, num_particles, _ = position.shape
    shape = (num_islands, num_particles, target.temperature.shape[1])
    temperature = jnp.broadcast_to(target.temperature[:, None], shape)
    if each:
        if partition.has_small_components:
            derive = partial(_derive_forward, potential_fn, partition, target.params)
        else:
            how = target.params, scores_at_once, rough_gradient
            derive = partial(_derive_reverse, potential_fn, *how)
        found = _components_first(blocks.over(derive, block, temperature, position))
        return found, lambda weight: jnp.einsum("jcn,jcnp->p", weight, found.scores)

    def all_fn(shared: Array, heat: Array, x: Array) -> Array:
        one_fn = jax.vmap(potential_fn, (None, 0, 0))
        potential: Array = over_islands(partial(one_fn, shared))(heat, x)
        return potential

    potential, pull = jax.vjp(all_fn, target.params, temperature, position)
    pull = roughly(pull) if rough_gradient else pull
    _, slope, gradient = pull(jnp.ones_like(potential))
    no_scores = jnp.zeros((*potential.shape, 0), position.dtype)
    summed = _components_first(Derivatives(potential, gradient, slope, no_scores))
    return summed, lambda weight: pull(jnp.swapaxes(weight, 1, 2))[0]


#: So many directions are written out one by one: a third quicker than as a batch.
_MOST_WRITTEN_OUT = 16


def _derive_reverse(
    potential_fn: Potential,
    params: Array,
    with_scores: bool,
    rough_gradient: bool,
    temperature: Array,
    position: Array,
) -> Derivatives:
    """Differentiate the potentials in reverse mode; with scores for one component only."""
    shape = (*position.shape[:2], params.size)
    each = (jnp.broadcast_to(params, shape),) if with_scores else ()
    one_fn = potential_fn if with_scores else partial(potential_fn, params)
    all_fn = over_islands(jax.vmap(one_fn))
    potential, pull = jax.vjp(all_fn, *each, temperature, position)
    pull = roughly(pull) if rough_gradient else pull
    *scores, slope, gradient = pull(jnp.ones_like(potential))
    found = scores[0][:, :, None] if scores else _no_scores(potential, params)
    return Derivatives(potential, gradient, slope, found)


def _no_scores(potential: Array, params: Array) -> Array:
    return jnp.zeros((*potential.shape, params.size), potential.dtype)


def evaluate_scores(
    potential_fn: Potential, target: Target, position: Array, block: int | None = None
) -> tuple[Array, Array]:
    """Return potentials and scores of each component and particle, in forward mode.

    (num_islands, components, num_particles), and with a last axis of num_params.
    """
    params = target.params
    directions = np.eye(params.size, dtype=params.dtype)
    shape = (*position.shape[:2], target.temperature.shape[1])

    def one(heat: Array, x: Array) -> tuple[Array, Array]:
        if params.size == 0:
            potential = potential_fn(params, heat, x)
            return potential, _no_scores(potential, params)
        potential, push = jax.linearize(lambda p: potential_fn(p, heat, x), params)
        return potential, _push_each(push, directions).T

    temperature = jnp.broadcast_to(target.temperature[:, None], shape)
    each = over_islands(jax.vmap(one))
    found = blocks.over(each, block, temperature, position)
    return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 1, 2), found)


def _push_each(push: Callable[..., Array], *directions: np.ndarray) -> Array:
    """Apply a linear function to each row of some arrays."""
    if len(directions[0]) > _MOST_WRITTEN_OUT:
        return jax.vmap(push)(*directions)
    rows = zip(*directions, strict=True)
    return jnp.stack([push(*map(jnp.asarray, row)) for row in rows])


def _derive_forward(
    potential_fn: Potential,
    partition: Partition,
    params: Array,
    temperature: Array,
    position: Array,
) -> Derivatives:
    """Differentiate the potentials of all particles in forward mode.

    One direction moves the first latent of every component, the next the second, and so
    on: components do not depend on each other's latents.
    """
    num_slots, num_components = int(partition.sizes.max()), partition.num_components
    along_t, along_x = (
        np.zeros((num_slots + 1, size), position.dtype)
        for size in (num_components, partition.dim)
    )
    along_x[:num_slots] = partition.slot == np.arange(num_slots)[:, None]
    along_t[num_slots] = 1.0

    def derive(heat: Array, x: Array) -> Derivatives:
        potential, push = jax.linearize(partial(potential_fn, params), heat, x)
        tangents = _push_each(push, along_t, along_x)
        gradient = tangents[:num_slots].reshape(-1)
        gradient = gradient[partition.slot * num_components + partition.owner]
        no_scores = _no_scores(potential, params)
        return Derivatives(potential, gradient, tangents[num_slots], no_scores)

    found: Derivatives = over_islands(jax.vmap(derive))(temperature, position)
    return found


def _components_first(found: Derivatives) -> Derivatives:
    """Put the axis of components before that of particles."""
    potential, slope, scores = (
        jnp.swapaxes(leaf, 1, 2) for leaf in (found.potential, found.slope, found.scores)
    )
    return Derivatives(potential, found.gradient, slope, scores)


def log_evidence(cloud: Cloud) -> Array:
    """Return each island's log-evidence of each component at the current target."""
    return cloud.log_evidence + log_mean_exp(cloud.log_weight)


def is_alive(partition: Partition, found: Derivatives) -> Array:
    """Tell which particles have a finite potential and gradient, by component."""
    broken = partition.total((~jnp.isfinite(found.gradient)).astype(jnp.int32))
    return jnp.isfinite(found.potential) & (broken == 0)


def _choose(mask: Array, yes: Array, no: Array | float) -> Array:
    """Choose by component and particle between values that may have more axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - mask.ndim)), yes, no)


def _to_coordinates(partition: Partition, values: Array) -> Array:
    """Give each coordinate what its component has: (islands, particles, dim or 1)."""
    return partition.spread(jnp.swapaxes(values, 1, 2))


def change_if(needed: Array, change_fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Change arrays if that is needed, else leave them where they are in memory.

    A loop of one turn at most: a branch would copy the arrays in either case.
    """

    def once(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.asarray(False), change_fn(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (needed, tree))[1]


def initial_cloud(
    partition: Partition,
    position: Array,
    momentum: Array,
    found: Derivatives,
    log_evidence: Array,
) -> Cloud:
    """Weigh draws from the first target, whose log-evidence is known, equally.

    The log-evidence of several components is counted with the first of them.
    """
    alive = is_alive(partition, found)
    log_weight = jnp.where(alive, 0.0, -jnp.inf).astype(position.dtype)
    # What is not finite must not reach the averages, where zero times it is not zero.
    here = _to_coordinates(partition, alive)
    settled = jnp.zeros(alive.shape[:2], position.dtype).at[:, 0].set(log_evidence)
    return Cloud(
        position=jnp.where(jnp.isfinite(position), position, 0.0),
        momentum=momentum,
        log_weight=log_weight,
        potential=_choose(alive, found.potential, 0.0),
        gradient=jnp.where(here, found.gradient, 0.0),
        slope=_choose(alive, found.slope, 0.0),
        scores=_choose(alive, found.scores, 0.0),
        log_evidence=settled,
    )


def is_due(cloud: Cloud, threshold: float) -> Array:
    """Tell which islands' effective sample size fell below the threshold; not the dead."""
    fraction = effective_fraction(cloud.log_weight)
    return (fraction > 0) & (fraction < threshold)


def resample(
    rng_key: PRNGKey,
    partition: Partition,
    cloud: Cloud,
    resampler: Resampler,
    due: Array,
) -> Cloud:
    """Resample the components of islands that are due, each by itself.

    The mean weight moves into the settled log-evidence, and the weights start anew.
    """
    num_particles = cloud.log_weight.shape[-1]
    keys = random.split(rng_key, due.shape)
    drawn = jax.vmap(jax.vmap(resampler))(keys, cloud.log_weight)
    ancestors = jnp.where(due[..., None], drawn, jnp.arange(num_particles))

    def pick(values: Array) -> Array:
        index = ancestors.reshape(ancestors.shape + (1,) * (values.ndim - 3))
        return jnp.take_along_axis(values, index, 2)

    def pick_rows(rows: Array) -> Array:
        if rows.shape[-1] == 0:
            return rows
        if partition.is_joint:
            return pick(rows[:, None])[:, 0]
        index = _to_coordinates(partition, ancestors)
        return jnp.take_along_axis(rows, index, 1)

    settled = jnp.where(due, log_mean_exp(cloud.log_weight), 0.0)
    return Cloud(
        position=pick_rows(cloud.position),
        momentum=pick_rows(cloud.momentum),
        log_weight=jnp.where(due[..., None], 0.0, cloud.log_weight),
        potential=pick(cloud.potential),
        gradient=pick_rows(cloud.gradient),
        slope=pick(cloud.slope),
        scores=pick(cloud.scores),
        log_evidence=cloud.log_evidence + settled,
    )


class Jumps(NamedTuple):
    """Proposals that do not depend on where a particle is."""

    needed: Array  # (), whether they are proposed
    position: Array  # (num_islands, num_particles, dim)
    work: Array  # (num_islands, components, num_particles), log of old to new density


def draw_jumps(rng_key: PRNGKey, cloud: Cloud, needed: Array) -> Jumps:
    """Draw proposals from a mixture that the other islands' particles define.

    For one component. Zeros if they are not needed.
    """
    num_islands, num_particles, _ = cloud.position.shape

    def draw() -> tuple[Array, Array]:
        clusters = mixture.fit(normalise(cloud.log_weight)[:, 0], cloud.position)
        position = mixture.loo_draw(rng_key, clusters, (num_islands, num_particles))
        old, new = (
            mixture.loo_log_density(clusters, rows) for rows in (cloud.position, position)
        )
        return position, (old - new)[:, None]

    def none() -> tuple[Array, Array]:
        return jnp.zeros_like(cloud.position), jnp.zeros_like(cloud.log_weight)

    return Jumps(needed, *lax.cond(needed, draw, none))


def _work(
    partition: Partition, kernel: Kernel, moved: Move, jumps: Jumps | None, new: Derivatives
) -> tuple[Array, Array]:
    """Return what a move adds to the log-weights, and the momentum it ends with."""
    after = kernel, moved, new.gradient
    work = over_islands(partial(langevin.work, partition))(*after)
    momentum = over_islands(partial(langevin.last_momentum, partition))(*after)
    if jumps is None:
        return work, momentum
    return (
        jnp.where(jumps.needed, jumps.work, work),
        jnp.where(jumps.needed, moved.momentum, momentum),
    )


def step(
    rng_key: PRNGKey,
    partition: Partition,
    cloud: Cloud,
    kernel: Kernel,
    evaluate_fn: Callable[[Array], tuple[Derivatives, ScoreFn]],
    fixed_target: Array,
    jumps: Jumps | None = None,
) -> tuple[Cloud, ScoreFn, StepInfo]:
    """Move the particles under their old target and weigh them for the new one.

    With ``fixed_target`` the two targets are the same. The work is then the log-ratio of a
    Metropolis test, and the weights do not change: where the target is stiff particles are
    rejected, where unadjusted ones would lose their weight. A rejected particle reverses
    its momentum, which keeps the momentum standard normal. ``jumps`` are proposed at a
    fixed target only.
    """
    move_key, test_key = random.split(rng_key)
    keys = random.split(move_key, len(cloud.position))
    moved: Move = over_islands(partial(langevin.move, partition))(
        keys, kernel, cloud.position, cloud.gradient, cloud.momentum
    )
    if jumps is not None:
        position = jnp.where(jumps.needed, jumps.position, moved.position)
        moved = Move(position, moved.momentum, moved.force)
    found, score_fn = evaluate_fn(moved.position)
    work, momentum = _work(partition, kernel, moved, jumps, found)
    # The difference first: the same float enters twice along the path and cancels.
    increment = (cloud.potential - found.potential) + work
    was_alive = jnp.isfinite(cloud.log_weight)
    alive = is_alive(partition, found) & jnp.isfinite(increment) & was_alive
    increment = jnp.where(alive, increment, -jnp.inf)
    uniform = random.uniform(test_key, increment.shape, increment.dtype)
    passed = jnp.where(fixed_target, jnp.log(uniform) < increment, alive)
    weighed = jnp.where(alive, cloud.log_weight + increment, -jnp.inf)
    log_weight = jnp.where(fixed_target, cloud.log_weight, weighed)
    momenta = momentum, -moved.momentum
    new = _keep(partition, cloud, moved.position, momenta, found, passed)
    new = new._replace(log_weight=log_weight)
    died = was_alive & ~jnp.isfinite(log_weight)
    return new, score_fn, StepInfo(increment, effective_fraction(log_weight), died.sum())


def _keep(
    partition: Partition,
    cloud: Cloud,
    moved: Array,
    momentum: tuple[Array, Array],
    found: Derivatives,
    passed: Array,
) -> Cloud:
    """Let the particles that passed move, and the others stay.

    ``momentum`` is that of a particle that moves, and of one that stays.
    """
    columns = cloud.momentum.shape[-1]
    moves = _to_coordinates(partition, passed)

    def put_back(places: tuple[Array, Array]) -> tuple[Array, Array]:
        position, gradient = places
        return (
            jnp.where(moves, position, cloud.position),
            jnp.where(moves, gradient, cloud.gradient),
        )

    places = moved, found.gradient
    if columns:
        position, gradient = put_back(places)
    else:  # what draws its noise anew hardly ever tests, and all pass unless one dies
        position, gradient = change_if(~passed.all(), put_back, places)
    return Cloud(
        position=position,
        momentum=jnp.where(moves, *momentum)[..., :columns],
        log_weight=cloud.log_weight,
        potential=_choose(passed, found.potential, cloud.potential),
        gradient=gradient,
        slope=_choose(passed, found.slope, cloud.slope),
        scores=_choose(passed, found.scores, cloud.scores),
        log_evidence=cloud.log_evidence,
    )
