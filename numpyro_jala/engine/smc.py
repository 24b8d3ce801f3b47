"""The engine: carry a cloud of weighted particles to the next target."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey, Resampler
from numpyro_jala.backend.memory import change_if
from numpyro_jala.engine import langevin, mixture
from numpyro_jala.engine.evaluation import Derivatives, ScoreFn, is_alive, over_islands
from numpyro_jala.engine.langevin import Kernel, Move
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.weights import effective_fraction, log_mean_exp, normalise

#: Of each island's particles, in a mixture that jumps come from.
_CLUSTERS = 4


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


def log_evidence(cloud: Cloud) -> Array:
    """Return each island's log-evidence of each component at the current target."""
    return cloud.log_evidence + log_mean_exp(cloud.log_weight)


def _choose(mask: Array, yes: Array, no: Array | float) -> Array:
    """Choose by component and particle between values that may have more axes."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - mask.ndim)), yes, no)


def _to_coordinates(partition: Partition, values: Array) -> Array:
    """Give each coordinate what its component has: (islands, particles, dim or 1)."""
    return partition.spread(jnp.swapaxes(values, 1, 2))


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
        if values.size == 0:  # of nothing a compiler would look for entries for long
            return values
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
        clusters = mixture.fit(normalise(cloud.log_weight)[:, 0], cloud.position, _CLUSTERS)
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
