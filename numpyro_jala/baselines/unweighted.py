r"""Particles without weights: ascend on the plain average of their scores.

One step of particle gradient descent (Kuntz et al. 2023) with a step size :math:`h` is

.. math::

    \theta' = \theta - \frac h N \sum_i \nabla_\theta U(\theta, x_i), \qquad
    x_i' = x_i - h \nabla_x U(\theta, x_i) + \sqrt{2h}\, \xi_i .

Others add noise to :math:`\theta`, give it a step size of its own, or take the particles
for states of one chain. None of them corrects for the step size, nor for parameters that
move while the particles do, so the averages are biased and there is no evidence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.engine import em, evaluation, langevin
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import IDENTITY
from numpyro_jala.engine.langevin import Kernel
from numpyro_jala.engine.partition import joint
from numpyro_jala.engine.state import Problem, traced


class Rule(NamedTuple):
    """What tells the algorithms apart.

    step_size
        Of the particles.
    noise
        Standard deviation of what a step adds to each unconstrained parameter.
    in_sequence
        The particles are successive states of one chain, at the same parameters.
    """

    step_size: float
    noise: float
    in_sequence: bool


class State(NamedTuple):
    """All that the next step depends on."""

    rng_key: PRNGKey
    num_steps: Array  # ()
    params: Array  # (num_params,)
    position: Array  # (1, num_particles, dim)
    optim_state: Any
    mean_params: Array  # (num_params,)


class Info(NamedTuple):
    """What a user may want to watch."""

    params: Array  # (num_params,), or (0,) if these are very many
    grad_norm: Array  # ()


def initial_state(
    rng_key: PRNGKey,
    optimiser: em.Optimiser,
    problem: Problem,
    params: Array,
    position: Array,
) -> State:
    """Begin with given particles."""
    optim_state = optimiser.init(problem.unravel(params))
    zero = jnp.zeros((), int)
    return State(rng_key, zero, params, position, optim_state, params)


def evaluate_model(
    problem: Problem, params: Array, position: Array
) -> tuple[evaluation.Derivatives, Array]:
    """Evaluate the model once at every particle; return the mean score as well."""
    target = Target(params, jnp.ones((1, 1), position.dtype))
    found, score_fn = evaluation.evaluate_model(
        problem.potential_fn, problem.partition, target, position, each=False
    )
    return found, score_fn(jnp.full_like(found.potential, 1 / position.shape[1]))


def _kernel(rule: Rule, dtype: Any) -> Kernel:
    one = jnp.ones(1, dtype)
    return Kernel(rule.step_size * one, IDENTITY, shift=0 * one, memory=0 * one)


def _move(rng_key: PRNGKey, kernel: Kernel, position: Array, gradient: Array) -> Array:
    whole, no_momentum = joint(position.shape[-1]), position[..., :0]
    moved = langevin.move(whole, rng_key, kernel, position, gradient, no_momentum)
    return moved.position


def _move_all(
    rng_key: PRNGKey, problem: Problem, rule: Rule, params: Array, position: Array
) -> tuple[Array, Array]:
    """Move every particle once; return them, and the score before they moved."""
    found, score = evaluate_model(problem, params, position)
    kernel = _kernel(rule, position.dtype)
    return _move(rng_key, kernel, position, found.gradient), score


def _run_chain(
    rng_key: PRNGKey, problem: Problem, rule: Rule, params: Array, position: Array
) -> tuple[Array, Array]:
    """Go on from the last state of the chain; return the new states and their score."""
    kernel = _kernel(rule, position.dtype)
    last = position[:, -1:]
    first, _ = evaluate_model(problem, params, last)

    def advance(carry: Any, key: PRNGKey) -> tuple[Any, Array]:
        state, gradient, total = carry
        state = _move(key, kernel, state, gradient)
        found, score = evaluate_model(problem, params, state)
        return (state, found.gradient, total + score), state[0, 0]

    keys = random.split(rng_key, position.shape[1])
    begin = (last, first.gradient, jnp.zeros_like(params))
    (_, _, total), states = lax.scan(advance, begin, keys)
    return states[None], total / len(states)


def step(
    problem: Problem, rule: Rule, optimiser: em.Optimiser, state: State
) -> tuple[State, Info]:
    """Move the parameters and the particles."""
    rng_key, move_key, noise_key = random.split(state.rng_key, 3)
    advance = _run_chain if rule.in_sequence else _move_all
    position, score = advance(move_key, problem, rule, state.params, state.position)
    tree, optim_state = optimiser.step(
        problem.unravel(score), state.optim_state, problem.unravel(state.params)
    )
    params = problem.ravel(tree)
    params += rule.noise * random.normal(noise_key, params.shape, params.dtype)
    num_steps = state.num_steps + 1
    mean = em.average(state.mean_params, params, num_steps)
    new = State(rng_key, num_steps, params, position, optim_state, mean)
    return new, Info(traced(params), jnp.linalg.norm(score))


@jax.jit
def is_finite(state: State) -> Array:
    """Tell whether every particle and parameter still is a number."""
    return jnp.isfinite(state.position).all() & jnp.isfinite(state.params).all()
