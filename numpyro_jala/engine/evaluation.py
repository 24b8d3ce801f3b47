"""Evaluate a model and its derivatives at every particle.

A potential and positions come in. The potentials of all components go out, with their
derivatives in the latents, the temperature and the parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, Potential
from numpyro_jala.backend import blocks
from numpyro_jala.backend.innermost import over_particles
from numpyro_jala.backend.precision import roughly
from numpyro_jala.engine.partition import Partition


class Target(NamedTuple):
    """A point on the path: what the potential depends on beside the particle."""

    params: Array  # (num_params,)
    temperature: Array  # (num_islands, components)


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
        found = _components_first(blocks.over(derive, block, position, temperature))
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


#: By up to so many params derivatives are found in forward mode.
FEW_DIRECTIONS = 8
#: So many directions are written out one by one: a third quicker than as a batch.
_MOST_WRITTEN_OUT = 16


def _derive_reverse(
    potential_fn: Potential,
    params: Array,
    with_scores: bool,
    rough_gradient: bool,
    position: Array,
    temperature: Array,
) -> Derivatives:
    """Differentiate the potentials in reverse mode; with scores for one component only."""
    at = (params,) if with_scores else ()
    one_fn = potential_fn if with_scores else partial(potential_fn, params)

    def derive(x: Array, heat: Array) -> Derivatives:
        potential, pull = jax.vjp(one_fn, *at, heat, x)
        pull = roughly(pull) if rough_gradient else pull
        *scores, slope, gradient = pull(jnp.ones_like(potential))
        found = scores[0][None] if scores else _no_scores(potential, params)
        return Derivatives(potential, gradient, slope, found)

    found: Derivatives = over_particles(derive)(position, temperature)
    return found


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

    def one(x: Array, heat: Array) -> tuple[Array, Array]:
        if params.size == 0:
            potential = potential_fn(params, heat, x)
            return potential, _no_scores(potential, params)
        potential, push = jax.linearize(lambda p: potential_fn(p, heat, x), params)
        return potential, _push_each(push, directions).T

    temperature = jnp.broadcast_to(target.temperature[:, None], shape)
    each = over_particles(one)
    found = blocks.over(each, block, position, temperature)
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
    position: Array,
    temperature: Array,
) -> Derivatives:
    """Differentiate the potentials of all particles in forward mode.

    One direction moves the first latent of every component, the next the second, and so
    on: components do not depend on each other's latents.
    """
    along_x = _by_slot(partition, position.dtype)
    along_x = np.concatenate([along_x, np.zeros_like(along_x[:1])])
    along_t = np.zeros((len(along_x), partition.num_components), position.dtype)
    along_t[-1] = 1.0

    def derive(x: Array, heat: Array) -> Derivatives:
        potential, push = jax.linearize(partial(potential_fn, params), heat, x)
        tangents = _push_each(push, along_t, along_x)
        gradient = _put_in_place(partition, tangents[:-1])
        no_scores = _no_scores(potential, params)
        return Derivatives(potential, gradient, tangents[-1], no_scores)

    found: Derivatives = over_particles(derive)(position, temperature)
    return found


def _by_slot(partition: Partition, dtype: np.dtype) -> np.ndarray:
    """Return the directions that move one latent of every component, in rows."""
    slots = np.arange(int(partition.sizes.max()))
    return (partition.slot == slots[:, None]).astype(dtype)


def _put_in_place(partition: Partition, tangents: Array) -> Array:
    """Return the gradient, given the derivatives of components along these directions."""
    places = partition.slot * partition.num_components + partition.owner
    return tangents.reshape(-1)[places]


def change_gradient(
    potential_fn: Potential,
    partition: Partition,
    target: Target,
    direction: Array,
    position: Array,
    block: int | None = None,
) -> Array:
    """Return how the particles' gradients change along a direction of the parameters."""
    along_x = _by_slot(partition, position.dtype)
    shape = (*position.shape[:2], target.temperature.shape[1])

    def one(x: Array, heat: Array) -> Array:
        def forward(params: Array) -> Array:
            _, push = jax.linearize(partial(potential_fn, params, heat), x)
            return _put_in_place(partition, _push_each(push, along_x))

        def reverse(params: Array) -> Array:
            return jax.grad(lambda x: potential_fn(params, heat, x).sum())(x)

        gradient_fn = forward if partition.has_small_components else reverse
        return jax.jvp(gradient_fn, (target.params,), (direction,))[1]

    temperature = jnp.broadcast_to(target.temperature[:, None], shape)
    found: Array = blocks.over(over_particles(one), block, position, temperature)
    return found


def _components_first(found: Derivatives) -> Derivatives:
    """Put the axis of components before that of particles."""
    potential, slope, scores = (
        jnp.swapaxes(leaf, 1, 2) for leaf in (found.potential, found.slope, found.scores)
    )
    return Derivatives(potential, found.gradient, slope, scores)


def is_alive(partition: Partition, found: Derivatives) -> Array:
    """Tell which particles have a finite potential and gradient, by component."""
    broken = partition.total((~jnp.isfinite(found.gradient)).astype(jnp.int32))
    return jnp.isfinite(found.potential) & (broken == 0)
