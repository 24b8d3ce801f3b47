"""The compiled parts of a run: start, run_steps, estimate, constrain.

Each is compiled once for a :class:`Fixed` problem and the shapes of its data.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.flatten_util import ravel_pytree

from numpyro_jala._typing import Array, Potential, PRNGKey
from numpyro_jala.backend import blocks, compilation
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import on_mesh
from numpyro_jala.engine import em, laplace, sampler, smc, turns
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.langevin import draw_noise
from numpyro_jala.engine.laplace import Whitening
from numpyro_jala.engine.resampling import systematic
from numpyro_jala.engine.state import (
    ANNEAL,
    ANNEAL_FIXED,
    EM_STEP,
    Info,
    Problem,
    Settings,
    State,
    no_info,
    together,
)
from numpyro_jala.inference import reference
from numpyro_jala.inference.reference import Gaussian
from numpyro_jala.model.components import Index
from numpyro_jala.model.density import Layout

#: Most steps of one call of the compiled loop; between calls Python looks on.
CHUNK = 100
#: Rest at the estimate: steps to go there and settle, then clouds to keep.
SETTLE, CLOUDS = 8, 5
#: Steps between two clouds. Small components ask particles for the place and the scale of
#: their draws alone: with 6, 3, 2 and 1 their error bars were 0.0182, 0.0183, 0.0183 and
#: 0.0186 for 1,000 groups, and a fifth of a run was spent there.
_APART, _APART_SMALL = 6, 2
#: Draws that are looked at if the first one has no density.
_LOOKS = 256


class Fixed(NamedTuple):
    """What a compilation depends on beside the shapes of the data."""

    layout: Layout
    settings: Settings


class Data(NamedTuple):
    """The arrays of the model, and the reference if it is not the prior.

    With a mode the particles live in the coordinates of :mod:`~numpyro_jala.engine.laplace`.
    Tables are the index of the layout, and may be left out: then each program holds them.
    """

    arrays: list[Array]
    gaussian: Gaussian | None = None
    mode: Array | None = None  # (dim,)
    tables: Index | None = None

    @property
    def from_prior(self) -> bool:
        """Whether the reference is the prior."""
        return self.gaussian is None and self.mode is None


def problem_of(fixed: Fixed, data: Data) -> Problem:
    """Put the model's potential and its data together."""
    layout, whitening = fixed.layout, whitening_of(fixed, data)
    return Problem(
        reference_path(fixed, data),
        None if whitening is None else whitening.potential_at,
        layout.partition,
        data.mode is None and layout.partition.is_joint,
        layout.unravel_params,
        lambda tree: ravel_pytree(tree)[0],
        jnp.asarray(layout.is_free),
        layout.rough_gradient,
        block_size(fixed),
    )


def reference_path(fixed: Fixed, data: Data) -> Potential:
    """Return the potentials of the components, from the reference to the posterior."""
    potential_fn = fixed.layout.potential(data.arrays, data.tables)
    if data.gaussian is not None:
        return reference.from_gaussian(potential_fn, data.gaussian)
    return potential_fn


def whitening_of(fixed: Fixed, data: Data) -> Whitening | None:
    """Return what makes the coordinates in which particles live, if that is not theirs."""
    layout = fixed.layout
    if data.mode is None:
        return None
    assert layout.pattern is not None
    fns = layout.potential(data.arrays, data.tables), layout.energy(data.arrays)
    return Whitening(*fns, layout.partition, layout.pattern, data.mode)


def potential_at(fixed: Fixed, data: Data, params: Array) -> Potential:
    """Return the potentials of the components near some parameters."""
    return problem_of(fixed, data).near(params).potential_fn


def to_latents(fixed: Fixed, data: Data, params: Array, position: Array) -> Array:
    """Return the unconstrained latents of particles."""
    whitening = whitening_of(fixed, data)
    if whitening is None:
        return position
    found = whitening.coordinates(params)
    return laplace.to_position(found, whitening.pattern, position)


def num_apart(fixed: Fixed) -> int:
    """Return how many steps at rest lie between two clouds."""
    return _APART_SMALL if fixed.layout.partition.has_small_components else _APART


def block_size(fixed: Fixed) -> int | None:
    """Return how many particles of an island to evaluate at a time, None for all."""
    settings = fixed.settings
    num_devices = 1 if settings.mesh is None else settings.mesh.size
    here = settings.num_islands // num_devices
    return blocks.num_particles(fixed.layout.width, here, settings.num_particles)


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def initial_state(fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array) -> State:
    """Draw a cloud from the reference."""
    layout, settings = fixed
    draw_key, state_key = random.split(rng_key)
    shape = settings.num_islands, settings.num_particles
    position = draw_reference(draw_key, fixed, data, params, shape)
    zeros = jnp.zeros((shape[0], layout.partition.num_components), position.dtype)
    # Else a compiler takes seconds to find out what follows from zeros.
    temperature = lax.optimization_barrier(zeros)  # type: ignore[no-untyped-call]
    target = Target(params, temperature)
    first = jnp.zeros((), position.dtype)
    if data.from_prior:
        first = layout.log_prior_mass(params, data.arrays)
    problem = problem_of(fixed, data)
    state = sampler.initial_state(
        state_key, problem, settings, target, position, first, ascends=False
    )
    return _with_coordinates(state, layout, data)


def _with_coordinates(state: State, layout: Layout, data: Data) -> State:
    """Note what the positions of the particles mean."""
    return state._replace(mode=data.mode, num_scaled=jnp.int32(len(layout.scaled)))


def draw_reference(
    rng_key: PRNGKey, fixed: Fixed, data: Data, params: Array, shape: tuple[int, int]
) -> Array:
    """Draw positions (*shape, dim) from the reference."""
    layout = fixed.layout
    if data.mode is None:
        return reference.draw(rng_key, layout, params, data.arrays, data.gaussian, shape)
    noise = draw_noise(rng_key, (*shape, layout.dim), data.mode.dtype)
    scale = laplace.reference_scale(layout.partition.sizes)
    return layout.partition.spread(jnp.asarray(scale, noise.dtype)) * noise


@partial(jax.jit, static_argnums=0, compiler_options=compilation.QUICK)
def is_alive(fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array) -> Array:
    """Tell whether any of a few draws from the prior has a finite density."""
    draws = reference.draw(rng_key, fixed.layout, params, data.arrays, None, (1, _LOOKS))
    joint, one = fixed.layout.joint(data.arrays), jnp.ones((), params.dtype)
    return jnp.isfinite(jax.vmap(lambda row: joint(params, one, row))(draws[0])).any()


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def initial_state_given(
    fixed: Fixed,
    rng_key: PRNGKey,
    data: Data,
    params: Array,
    particles: dict[str, Array],
    log_evidence: Array,
) -> State:
    """Take given latents as draws from the posterior."""
    layout, settings = fixed
    flat = jax.vmap(lambda v: layout.unconstrain(params, v, data.arrays))(particles)
    whitening = whitening_of(fixed, data)
    if whitening is not None:
        found = whitening.coordinates(params)
        flat = laplace.to_whitened(found, whitening.pattern, flat)
    shape = settings.num_islands, settings.num_particles
    position = flat.reshape(*shape, layout.dim)
    temperature = jnp.ones((shape[0], layout.partition.num_components), position.dtype)
    target = Target(params, temperature)
    problem = problem_of(fixed, data)
    state = sampler.initial_state(
        rng_key, problem, settings, target, position, log_evidence, ascends=True
    )
    return _with_coordinates(state, layout, data)


def _step(
    problem: Problem, fixed: Fixed, state: State, stage: Array, goal: Array, wait: Array
) -> tuple[State, Info]:
    """Take one step, which has two moves where params and particles take turns."""

    def move(_: Array | int, both: tuple[State, Info]) -> tuple[State, Info]:
        at = stage, goal, wait
        new, info = sampler.step(problem, fixed.settings, both[0], *at)
        return new, together(both[1], info)

    both = state, no_info(state)
    if not fixed.settings.takes_turns:  # an accelerator waits at each turn of a loop
        return move(0, both)
    num_moves = turns.num_moves(fixed.settings, stage)
    found: tuple[State, Info] = lax.fori_loop(0, num_moves, move, both)
    return found


@compilation.program(static_argnums=0)
@on_mesh
def em_step(fixed: Fixed, data: Data, state: State) -> tuple[State, Info]:
    """Move the parameters, then the particles."""
    stage, goal = jnp.asarray(EM_STEP), state.target.params
    return _step(problem_of(fixed, data), fixed, state, stage, goal, stage)


@compilation.program(static_argnums=0)
@on_mesh
def run_steps(
    fixed: Fixed,
    data: Data,
    state: State,
    stage: Array,
    num_steps: Array,
    goal: Array,
    wait: Array,
) -> tuple[State, Info, Array]:
    """Take up to ``num_steps`` steps, at most ``CHUNK``; annealing ends on arrival."""
    problem = problem_of(fixed, data)

    def body(carry: Any) -> Any:
        current, infos, count = carry
        current, info = _step(problem, fixed, current, stage, goal, wait - count)
        infos = jax.tree.map(lambda all_, one: all_.at[count].set(one), infos, info)
        return current, infos, count + 1

    def unfinished(carry: Any) -> Array:
        current, _, count = carry
        arrived = jnp.all(current.target.temperature >= 1)
        anneals = (stage == ANNEAL) | (stage == ANNEAL_FIXED)
        return (count < num_steps) & ~(anneals & arrived)

    infos = jax.tree.map(
        lambda leaf: jnp.zeros((CHUNK, *leaf.shape), leaf.dtype), no_info(state)
    )
    return lax.while_loop(unfinished, body, (state, infos, jnp.zeros((), int)))


@compilation.program(static_argnums=0)
@on_mesh
def anneal(fixed: Fixed, data: Data, state: State) -> State:
    """Walk from the reference to the posterior in one go."""
    problem, stage = problem_of(fixed, data), jnp.asarray(ANNEAL)

    def body(current: State) -> State:
        params = current.target.params
        return sampler.step(problem, fixed.settings, current, stage, params, stage)[0]

    def unfinished(current: State) -> Array:
        # A component goes no further whose islands have no others to learn from.
        alive = jnp.isfinite(current.cloud.log_weight).any(-1).sum(0)
        lives = jnp.all(alive >= min(2, fixed.settings.num_islands))
        return jnp.any(current.target.temperature < 1) & lives

    return lax.while_loop(unfinished, body, state)


@compilation.program(static_argnums=0)
def best_params(fixed: Fixed, state: State) -> Array:
    """Return the average of the parameters, unless they still travel."""
    params, settings = state.target.params, fixed.settings
    if not settings.newton or settings.num_islands == 1 or params.size == 0:
        return params
    change, parts = state.mean_params - params, fixed.layout.partition
    is_near = em.is_near(state.optim_state, change, SETTLE // 2, parts.num_components)
    return jnp.where(is_near & (state.num_steps > 0), state.mean_params, params)


@compilation.program(static_argnums=0)
@exactly
def constrain_draws(
    fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array, position: Array
) -> dict[str, Array]:
    """Map positions (num_islands, num_particles, dim) to values of the model's sites."""
    keys = random.split(rng_key, position.shape[:2])

    def one(key: PRNGKey, row: Array) -> dict[str, Array]:
        return fixed.layout.constrain(key, params, row, data.arrays)

    return jax.vmap(jax.vmap(one))(keys, to_latents(fixed, data, params, position))


@compilation.program(static_argnums=0)
@exactly
def predict(
    fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array, position: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draw data at each position, and return the log-likelihood of the observed."""
    keys = random.split(rng_key, position.shape[:2])

    def one(key: PRNGKey, row: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        return fixed.layout.predict(key, params, row, data.arrays)

    return jax.vmap(jax.vmap(one))(keys, to_latents(fixed, data, params, position))


@compilation.program(static_argnums=0)
def constrain_trace(fixed: Fixed, params: Array) -> dict[str, Any]:
    """Map a trace of parameters (steps, num_params) to values of the param sites."""
    return jax.vmap(fixed.layout.constrain_params)(params)


def log_evidence(state: State) -> Array:
    """Return each island's log-evidence of each component along the path."""
    return smc.log_evidence(state.cloud)


@compilation.program(static_argnums=())
def draw_ancestors(rng_key: PRNGKey, log_weight: Array) -> Array:
    """Draw which particles stand for all with equal weights.

    Within each island and component, (num_islands, components, num_particles).
    """
    keys = random.split(rng_key, log_weight.shape[:2])
    return jax.vmap(jax.vmap(systematic))(keys, log_weight)
