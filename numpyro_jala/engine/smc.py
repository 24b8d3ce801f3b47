"""The engine: carry a cloud of weighted particles to the next target."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, Potential, PRNGKey, Resampler, Tree
from numpyro_jala.backend import blocks
from numpyro_jala.backend.precision import roughly
from numpyro_jala.engine import langevin
from numpyro_jala.engine.langevin import Kernel
from numpyro_jala.engine.weights import effective_fraction, log_mean_exp


class Target(NamedTuple):
    """A point on the path: what the potential depends on beside the particle."""

    params: Array  # (num_params,)
    temperature: Array  # (num_islands,)


class Cloud(NamedTuple):
    """Weighted particles in islands, and the target's potential where they stand.

    position
        Unconstrained latents, one row per particle.
    momentum
        Standard normal in whitened units, and independent of the position.
    log_weight
        Unnormalised log-weights since the island's last resampling.
    potential, gradient, slope, scores
        The potential and its derivatives with respect to the position, the temperature
        and the parameters, kept so that a step evaluates the model once.
    log_evidence
        What was settled at the resamplings; see :func:`log_evidence`.
    """

    position: Array  # (num_islands, num_particles, dim)
    momentum: Array  # (num_islands, num_particles, dim or 0)
    log_weight: Array  # (num_islands, num_particles)
    potential: Array  # (num_islands, num_particles)
    gradient: Array  # (num_islands, num_particles, dim)
    slope: Array  # (num_islands, num_particles)
    scores: Array  # (num_islands, num_particles, num_params or 0)
    log_evidence: Array  # (num_islands,)

    @property
    def rates(self) -> Array:
        """Derivatives with respect to the temperature and the parameters, in columns."""
        return jnp.concatenate([self.slope[..., None], self.scores], -1)


class StepInfo(NamedTuple):
    """What a step did, before its resampling."""

    increment: Array  # (num_islands, num_particles)
    ess: Array  # (num_islands,), a fraction
    died: Array  # (), particles that came to a non-finite potential


class Derivatives(NamedTuple):
    """A potential and its derivatives at every particle."""

    potential: Array  # (num_islands, num_particles)
    gradient: Array  # (num_islands, num_particles, dim)
    slope: Array  # (num_islands, num_particles)
    scores: Array  # (num_islands, num_particles, num_params or 0)


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
    target: Target,
    position: Array,
    each: bool,
    rough_gradient: bool = False,
    block: int | None = None,
) -> tuple[Derivatives, ScoreFn]:
    """Evaluate the model once at every particle.

    The score of a particle is the derivative of its potential with respect to the
    parameters. With ``each`` every particle's score is kept, which is for few
    parameters, and at most ``block`` particles of an island are evaluated at a time.
    Without it scores are only ever summed, in one pull-back of the potentials with the
    weights: memory does not grow with particles times parameters.
    """
    temperature = jnp.broadcast_to(target.temperature[:, None], position.shape[:2])

    def derive(all_fn: Callable[..., Array], params: Array, heat: Array, x: Array) -> Any:
        potential, pull = jax.vjp(all_fn, params, heat, x)
        pull = roughly(pull) if rough_gradient else pull
        scores, slope, gradient = pull(jnp.ones_like(heat))
        return Derivatives(potential, gradient, slope, scores), pull

    if each:

        def derive_each(heat: Array, x: Array) -> Any:
            params = jnp.broadcast_to(target.params, (*heat.shape, target.params.size))
            return derive(over_islands(jax.vmap(potential_fn)), params, heat, x)[0]

        found: Derivatives = blocks.over(derive_each, block, temperature, position)
        return found, lambda weight: jnp.einsum("jn,jnp->p", weight, found.scores)

    def all_fn(shared: Array, heat: Array, x: Array) -> Array:
        one_fn = jax.vmap(potential_fn, (None, 0, 0))
        potential: Array = over_islands(partial(one_fn, shared))(heat, x)
        return potential

    summed, pull = derive(all_fn, target.params, temperature, position)
    no_scores = jnp.zeros((*temperature.shape, 0), position.dtype)
    return summed._replace(scores=no_scores), lambda weight: pull(weight)[0]


def log_evidence(cloud: Cloud) -> Array:
    """Return each island's estimate of the log-evidence of the current target."""
    return cloud.log_evidence + log_mean_exp(cloud.log_weight)


def is_alive(found: Derivatives) -> Array:
    """Tell which particles have a finite potential and gradient."""
    return jnp.isfinite(found.potential) & jnp.isfinite(found.gradient).all(-1)


def _choose(mask: Array, yes: Array, no: Array | float) -> Array:
    """Choose by particle between values that may have more axes than the mask."""
    return jnp.where(mask.reshape(mask.shape + (1,) * (yes.ndim - mask.ndim)), yes, no)


def change_if(needed: Array, change_fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Change arrays if that is needed, else leave them where they are in memory.

    A loop of one turn at most: a branch would copy the arrays in either case.
    """

    def once(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.asarray(False), change_fn(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (needed, tree))[1]


def initial_cloud(
    position: Array, momentum: Array, found: Derivatives, log_evidence: Array
) -> Cloud:
    """Weigh draws from the first target, whose log-evidence is known, equally."""
    alive = is_alive(found)
    log_weight = jnp.where(alive, 0.0, -jnp.inf).astype(position.dtype)
    # What is not finite must not reach the averages, where zero times it is not zero.
    known = jax.tree.map(lambda leaf: _choose(alive, leaf, 0.0), found)
    settled = jnp.broadcast_to(
        jnp.asarray(log_evidence, position.dtype), position.shape[:1]
    )
    return Cloud(
        position=position,
        momentum=momentum,
        log_weight=log_weight,
        potential=known.potential,
        gradient=known.gradient,
        slope=known.slope,
        scores=known.scores,
        log_evidence=settled,
    )


def is_due(cloud: Cloud, threshold: float) -> Array:
    """Tell which islands' effective sample size fell below the threshold; not the dead."""
    fraction = effective_fraction(cloud.log_weight)
    return (fraction > 0) & (fraction < threshold)


def resample(rng_key: PRNGKey, cloud: Cloud, resampler: Resampler, due: Array) -> Cloud:
    """Resample the islands that are due.

    The mean weight moves into the settled log-evidence, and the weights start anew.
    """
    num_islands, num_particles = cloud.log_weight.shape
    keys = random.split(rng_key, num_islands)
    drawn = jax.vmap(resampler)(keys, cloud.log_weight)
    ancestors = jnp.where(due[:, None], drawn, jnp.arange(num_particles))

    def pick(values: Array) -> Array:
        picked: Array = over_islands(lambda rows, index: rows[index])(values, ancestors)
        return picked

    settled = jnp.where(due, log_mean_exp(cloud.log_weight), 0.0)
    return Cloud(
        position=pick(cloud.position),
        momentum=pick(cloud.momentum),
        log_weight=jnp.where(due[:, None], 0.0, cloud.log_weight),
        potential=pick(cloud.potential),
        gradient=pick(cloud.gradient),
        slope=pick(cloud.slope),
        scores=pick(cloud.scores),
        log_evidence=cloud.log_evidence + settled,
    )


def step(
    rng_key: PRNGKey,
    cloud: Cloud,
    kernel: Kernel,
    evaluate_fn: Callable[[Array], tuple[Derivatives, ScoreFn]],
    fixed_target: Array,
) -> tuple[Cloud, ScoreFn, StepInfo]:
    """Move the particles under their old target and weigh them for the new one.

    With ``fixed_target`` the two targets are the same. The work is then the log-ratio of a
    Metropolis test, and the weights do not change: where the target is stiff particles are
    rejected, where unadjusted ones would lose their weight. A rejected particle reverses
    its momentum, which keeps the momentum standard normal.
    """
    num_islands, num_particles, columns = cloud.momentum.shape
    move_key, test_key = random.split(rng_key)
    keys = random.split(move_key, num_islands)
    moved = over_islands(langevin.move)(
        keys, kernel, cloud.position, cloud.gradient, cloud.momentum
    )
    found, score_fn = evaluate_fn(moved.position)
    # The difference first: the same float enters twice along the path and cancels.
    work = over_islands(langevin.work)(kernel, moved, found.gradient)
    momentum = over_islands(langevin.last_momentum)(kernel, moved, found.gradient)
    increment = (cloud.potential - found.potential) + work
    was_alive = jnp.isfinite(cloud.log_weight)
    alive = is_alive(found) & jnp.isfinite(increment) & was_alive
    increment = jnp.where(alive, increment, -jnp.inf)
    uniform = random.uniform(test_key, (num_islands, num_particles), increment.dtype)
    passed = jnp.where(fixed_target, jnp.log(uniform) < increment, alive)
    weighed = jnp.where(alive, cloud.log_weight + increment, -jnp.inf)
    log_weight = jnp.where(fixed_target, cloud.log_weight, weighed)

    def put_back(places: tuple[Array, Array]) -> tuple[Array, Array]:
        position, gradient = places
        return (
            _choose(passed, position, cloud.position),
            _choose(passed, gradient, cloud.gradient),
        )

    places = moved.position, found.gradient
    if columns:
        position, gradient = put_back(places)
    else:  # what draws its noise anew hardly ever tests, and all pass unless one dies
        position, gradient = change_if(~passed.all(), put_back, places)
    new = Cloud(
        position=position,
        momentum=_choose(passed, momentum, -moved.momentum)[..., :columns],
        log_weight=log_weight,
        potential=_choose(passed, found.potential, cloud.potential),
        gradient=gradient,
        slope=_choose(passed, found.slope, cloud.slope),
        scores=_choose(passed, found.scores, cloud.scores),
        log_evidence=cloud.log_evidence,
    )
    died = was_alive & ~jnp.isfinite(log_weight)
    return new, score_fn, StepInfo(increment, effective_fraction(log_weight), died.sum())
