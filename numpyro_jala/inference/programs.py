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

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import blocks
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import on_mesh, share
from numpyro_jala.engine import em, sampler, smc
from numpyro_jala.engine.resampling import systematic
from numpyro_jala.engine.smc import Target
from numpyro_jala.engine.state import (
    ANNEAL,
    ANNEAL_FIXED,
    REST,
    Info,
    Problem,
    Settings,
    State,
    no_info,
)
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import evidence, reference
from numpyro_jala.inference.evidence import Gaussian
from numpyro_jala.inference.information import Moments, moments
from numpyro_jala.model.density import Layout

#: Most steps of one call of the compiled loop; between calls Python looks on.
CHUNK = 100
#: Rest at the estimate: steps to go there and settle, then clouds to keep, and how many
#: steps apart.
SETTLE, CLOUDS, APART = 8, 5, 6


class Fixed(NamedTuple):
    """What a compilation depends on beside the shapes of the data."""

    layout: Layout
    settings: Settings


class Data(NamedTuple):
    """The arrays of the model, and the reference if it is not the prior."""

    arrays: list[Array]
    gaussian: Gaussian | None


def problem_of(fixed: Fixed, data: Data) -> Problem:
    """Put the model's potential and its data together."""
    layout = fixed.layout
    potential_fn = layout.joint(data.arrays)
    if data.gaussian is not None:
        potential_fn = reference.from_gaussian(potential_fn, data.gaussian)
    return Problem(
        potential_fn,
        layout.unravel_params,
        lambda tree: ravel_pytree(tree)[0],
        jnp.asarray(layout.is_free),
        layout.rough_gradient,
        _block(fixed),
    )


def _block(fixed: Fixed) -> int | None:
    settings = fixed.settings
    num_devices = 1 if settings.mesh is None else settings.mesh.size
    here = settings.num_islands // num_devices
    return blocks.num_particles(fixed.layout.width, here, settings.num_particles)


@partial(jax.jit, static_argnums=0)
@on_mesh
@exactly
def initial_state(fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array) -> State:
    """Draw a cloud from the reference."""
    layout, settings = fixed
    draw_key, state_key = random.split(rng_key)
    shape = settings.num_islands, settings.num_particles
    position = reference.draw(draw_key, layout, params, data.arrays, data.gaussian, shape)
    target = Target(params, jnp.zeros(shape[:1], position.dtype))
    zero = jnp.zeros((), position.dtype)
    problem = problem_of(fixed, data)
    return sampler.initial_state(
        state_key, problem, settings, target, position, zero, ascends=False
    )


@partial(jax.jit, static_argnums=0)
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
    shape = settings.num_islands, settings.num_particles
    position = flat.reshape(*shape, layout.dim)
    target = Target(params, jnp.ones(shape[:1], position.dtype))
    problem = problem_of(fixed, data)
    return sampler.initial_state(
        rng_key, problem, settings, target, position, log_evidence, ascends=True
    )


@partial(jax.jit, static_argnums=0)
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
        current, info = sampler.step(
            problem, fixed.settings, current, stage, goal, wait - count
        )
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


@on_mesh
def anneal(fixed: Fixed, data: Data, state: State) -> State:
    """Walk from the reference to the posterior in one go."""
    problem, stage = problem_of(fixed, data), jnp.asarray(ANNEAL)

    def body(current: State) -> State:
        params = current.target.params
        return sampler.step(problem, fixed.settings, current, stage, params, stage)[0]

    def unfinished(current: State) -> Array:
        alive = jnp.isfinite(current.cloud.log_weight).any()
        return jnp.any(current.target.temperature < 1) & alive

    return lax.while_loop(unfinished, body, state)


@partial(jax.jit, static_argnums=0)
@on_mesh
@exactly
def estimate(
    fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array, clouds: list[smc.Cloud]
) -> tuple[evidence.Bridge, Array]:
    """Estimate the log-evidence from several clouds at rest.

    Returns what it is for potentials less their lowest value, and that value: their
    differences have more digits.
    """
    weight, position, gradient, potential = (
        jnp.concatenate(parts, axis=1)
        for parts in zip(
            *(
                (normalise(c.log_weight), c.position, c.gradient, c.potential)
                for c in clouds
            ),
            strict=True,
        )
    )
    weight = weight / len(clouds)
    dense = fixed.settings.preconditioner == "dense"
    draws, at_particles, at_draws = evidence.draw_loo(
        rng_key, weight, position, gradient, dense
    )
    joint = fixed.layout.joint(data.arrays)
    one = jnp.ones((), position.dtype)
    each = jax.vmap(jax.vmap(lambda x: joint(params, one, x)))
    at_new = blocks.over(each, _block(fixed), draws)
    at_new = jnp.where(jnp.isfinite(at_new), at_new, jnp.inf)
    level = jnp.min(jnp.where(weight > 0, potential, jnp.inf))
    at_particles, at_draws = level - potential - at_particles, level - at_new - at_draws
    return share((evidence.bridge(weight, at_particles, at_draws), level))


@partial(jax.jit, static_argnums=0)
def best_params(fixed: Fixed, state: State) -> Array:
    """Return the average of the parameters, unless they still travel."""
    params, settings = state.target.params, fixed.settings
    if not settings.newton or settings.num_islands == 1 or params.size == 0:
        return params
    is_near = em.is_near(state.optim_state, state.mean_params - params, SETTLE // 2)
    return jnp.where(is_near & (state.num_steps > 0), state.mean_params, params)


@on_mesh
def settle(fixed: Fixed, data: Data, state: State) -> tuple[Array, evidence.Bridge, State]:
    """Rest at the estimate and find the evidence there, in one go."""
    problem, stage = problem_of(fixed, data), jnp.asarray(REST)
    params = best_params(fixed, state)
    rng_key, bridge_key = random.split(random.fold_in(state.rng_key, 1))

    def rest(current: State, num_steps: int, wait: int) -> State:
        def body(count: int, here: State) -> State:
            left = jnp.asarray(wait) - count
            return sampler.step(problem, fixed.settings, here, stage, params, left)[0]

        return lax.fori_loop(0, num_steps, body, current)

    def keep(current: State, _: None) -> tuple[State, smc.Cloud]:
        current = rest(current, APART, 0)
        return current, current.cloud

    state = rest(state._replace(rng_key=rng_key), SETTLE, SETTLE if params.size else 0)
    state, kept = lax.scan(keep, state, length=CLOUDS)
    clouds = [jax.tree.map(lambda leaf, i=i: leaf[i], kept) for i in range(CLOUDS)]
    bridge, level = estimate(fixed, bridge_key, data, params, clouds)
    bridge = bridge._replace(
        log_evidence=bridge.log_evidence - level, islands=bridge.islands - level
    )
    return params, bridge, state


@partial(jax.jit, static_argnums=0)
@on_mesh
@exactly
def louis(
    fixed: Fixed, data: Data, params: Array, cloud: smc.Cloud, follows: Array
) -> Moments:
    """Average over one cloud at rest what the information about the parameters needs."""
    joint = fixed.layout.joint(data.arrays)
    weight, dense = normalise(cloud.log_weight), fixed.settings.preconditioner == "dense"
    return share(moments(joint, params, weight, cloud.position, dense, follows))


@partial(jax.jit, static_argnums=0)
@exactly
def constrain_draws(
    fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array, position: Array
) -> dict[str, Array]:
    """Map positions (num_islands, num_particles, dim) to values of the model's sites."""
    keys = random.split(rng_key, position.shape[:2])

    def one(key: PRNGKey, row: Array) -> dict[str, Array]:
        return fixed.layout.constrain(key, params, row, data.arrays)

    return jax.vmap(jax.vmap(one))(keys, position)


@partial(jax.jit, static_argnums=0)
@exactly
def predict(
    fixed: Fixed, rng_key: PRNGKey, data: Data, params: Array, position: Array
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draw data at each position, and return the log-likelihood of the observed."""
    keys = random.split(rng_key, position.shape[:2])

    def one(key: PRNGKey, row: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        return fixed.layout.predict(key, params, row, data.arrays)

    return jax.vmap(jax.vmap(one))(keys, position)


@partial(jax.jit, static_argnums=0)
def constrain_trace(fixed: Fixed, params: Array) -> dict[str, Any]:
    """Map a trace of parameters (steps, num_params) to values of the param sites."""
    return jax.vmap(fixed.layout.constrain_params)(params)


def log_evidence(state: State) -> Array:
    """Return each island's recursive estimate."""
    return smc.log_evidence(state.cloud)


@jax.jit
def draw_ancestors(rng_key: PRNGKey, log_weight: Array) -> Array:
    """Draw which particles stand for all with equal weights, within each island."""
    keys = random.split(rng_key, len(log_weight))
    return jax.vmap(systematic)(keys, log_weight)
