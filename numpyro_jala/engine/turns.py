"""Whose turn it is to move: the target's, the particles', or that of both.

The particles and their target take turns. A target that moves while they stand still costs
the weights least, and a target that stands still allows a Metropolis test. The ascent of
few components moves both at once, which is the algorithm of the paper. There the error of
the particles' steps is left to the weights, whose means over few particles are biased, in
each component alike: with eight in an island and 200 components a score was off by ten of
its standard errors. An island that has fewer particles than components takes turns there too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine.adaptation import tested_multiplier
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.state import ANNEAL, ANNEAL_FIXED, EM_STEP, REST, Settings, State


def period(settings: Settings, stage: Array) -> Array:
    """Return after how many steps the target moves again."""
    anneals = (stage == ANNEAL) | (stage == ANNEAL_FIXED)
    together = (stage == EM_STEP) & (not settings.takes_turns)
    at_posterior = jnp.where(together, 1, 2)
    return jnp.where(anneals, 1 + settings.moves_per_temperature, at_posterior)


def num_moves(settings: Settings, stage: Array | int) -> Array:
    """Return how many moves make one step: an EM step has one of the parameters."""
    return jnp.where((stage == EM_STEP) & settings.takes_turns, 2, 1)


def _moves_target(settings: Settings, num_moves: Array, stage: Array) -> Array:
    """Tell whether the step after so many goes to the planned target."""
    return num_moves % period(settings, stage) == 0


def will_move(
    settings: Settings, state: State, target: Target, stage: Array, wait: Array
) -> Array:
    """Tell whether a plan made after the step to a target would be carried out."""
    anneals = ((stage == ANNEAL) | (stage == ANNEAL_FIXED)) & jnp.any(
        target.temperature < 1
    )
    stands = ~_moves_target(settings, state.num_moves + 1, stage)
    ascends_in_turn = (stage == EM_STEP) & settings.takes_turns
    waits = (anneals | ascends_in_turn) & stands
    return ~waits & ~((stage == REST) & (wait <= 1))


def next_target(
    settings: Settings, state: State, stage: Array, goal: Array, wait: Array
) -> tuple[Target, Array]:
    """Return the next target, and whether it is the one where the particles stand."""
    resting = stage == REST
    arrived = resting & (wait <= 0)
    fixed_target = arrived | ~_moves_target(settings, state.num_moves, stage)
    here, turns = state.target.params, (wait + 1) // 2
    approach = here + (goal - here) / jnp.maximum(turns, 1)
    params = jnp.where(resting, approach, state.plan.target.params)
    next_ = Target(params, state.plan.target.temperature)
    target = jax.tree.map(lambda a, b: jnp.where(fixed_target, a, b), state.target, next_)
    return target, fixed_target


def step_multiplier(
    settings: Settings, step_size: Array, ascending: Array, fixed_target: Array
) -> Array:
    """Return by how much each island's next step is longer than the leave-one-out step size."""
    given = settings.step_size is not None
    tested = jnp.ones_like(step_size) if given else tested_multiplier(step_size)
    untested = jnp.where(ascending & (not settings.takes_turns), 1.0, 0.0)
    return jnp.where(fixed_target, tested, untested)
