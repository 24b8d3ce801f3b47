"""Choose the next target: a temperature and parameters that the cloud can follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_jala._typing import Array
from numpyro_jala.backend import blocks
from numpyro_jala.engine import em, evaluation, tempering, transport
from numpyro_jala.engine.curvature import second_derivative
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import solve
from numpyro_jala.engine.state import (
    ANNEAL,
    ANNEAL_FIXED,
    EM_STEP,
    REST,
    Plan,
    Problem,
    Settings,
    State,
)
from numpyro_jala.engine.weights import normalise, pool

_HESSIAN_EVERY = 10
#: Below this temperature the second derivative is not that of the posterior.
_EARLY = 0.5
_MEMORY = 0.95
#: While annealing, the temperature waits until the Newton decrement is below this.
_HOLD = 10.0
#: And less than this for each component.
_HOLD_EACH = 0.1
#: Variance of the log-weights that a step of the parameters may cause in one component, if
#: it is within the trust region on average: an effective sample size of a third is left.
_MOST_VARIANCE = 1.0


def _learn_transport(
    problem: Problem, settings: Settings, state: State, weight: Array
) -> transport.Transport:
    rate = state.cloud.rates
    if not settings.adapts:
        return transport.none(state.cloud, rate)
    fresh = (state.num_moves == 0) | jnp.any(state.target.temperature < 1)
    memory = jnp.where(fresh, 0.0, _MEMORY)
    last = state.plan.transport_learned
    return transport.learn(
        weight, state.cloud, rate, state.factor, problem.partition, last, memory
    )


def plan(
    problem: Problem,
    settings: Settings,
    state: State,
    score_fn: evaluation.ScoreFn,
    stage: Array,
) -> tuple[Plan, Any]:
    """Choose the next target on the state's weights, which must not be resampled yet."""
    weight = normalise(state.cloud.log_weight)
    carried = _learn_transport(problem, settings, state, weight)
    if settings.newton:
        step, score, optim_state, newton_decrement, cost = _newton_step(
            problem, state, weight, carried, stage
        )
        drift = carried.rate[..., 1:] @ step
    else:
        step, score, optim_state = _optimiser_step(
            problem, settings, state, weight, score_fn, stage
        )
        newton_decrement = cost = jnp.zeros((), step.dtype)
        drift = jnp.zeros_like(weight)
    temperature = state.target.temperature
    if settings.adapts:
        hold = (stage == ANNEAL) & (newton_decrement > _hold_above(temperature))
        slope = carried.rate[..., 0]
        temperature = tempering.next_temperature(
            temperature,
            weight,
            slope,
            drift,
            _reach(problem, state, carried.shift[:, :1]),
            hold,
            settings.temperature_drop,
        )
    target = Target(state.target.params + step, temperature)
    plan = Plan(target, carried.shift, carried.learned, score, newton_decrement, cost)
    return plan, optim_state


def _reach(problem: Problem, state: State, shift: Array) -> Array:
    """Return how far a shift (num_islands, 1, dim) goes in whitened coordinates."""
    partition = problem.partition
    return partition.total(solve(state.factor, partition, shift) ** 2)[..., 0] ** 0.5


def _hold_above(temperature: Array) -> float:
    """Return the Newton decrement above which the parameters are far off."""
    return max(_HOLD, _HOLD_EACH * temperature.shape[1])


def _newton_step(
    problem: Problem,
    state: State,
    weight: Array,
    carried: transport.Transport,
    stage: Array,
) -> tuple[Array, Array, em.Newton, Array, Array]:
    """Return the default's step, its score, memory, Newton decrement, and cost."""
    newton = state.optim_state
    score = jnp.einsum("jcn,jcnp->p", pool(weight), carried.rate[..., 1:])
    zero = jnp.zeros((), weight.dtype)
    if score.size == 0:
        return score, score, newton, zero, zero
    return lax.cond(
        stage == ANNEAL_FIXED,
        lambda: (jnp.zeros_like(score), score, newton, zero, zero),
        lambda: _newton_ascent(problem, state, weight, carried, score, stage),
    )


def _newton_ascent(
    problem: Problem,
    state: State,
    weight: Array,
    carried: transport.Transport,
    score: Array,
    stage: Array,
) -> tuple[Array, Array, em.Newton, Array, Array]:
    """Return what :func:`_newton_step` does unless the parameters hold still."""
    newton, temperature = state.optim_state, state.target.temperature
    rate, tempered = carried.rate[..., 1:], jnp.any(temperature < 1)
    within = transport.summed_covariance(weight, transport.within(weight, rate))
    pooled = transport.summed_covariance(weight, rate)
    # Near the maximum the second derivative hardly changes.
    due = tempered | newton.is_early | (state.num_moves % _HESSIAN_EVERY == 0)
    due |= state.plan.cost > 0.02
    complete = lax.cond(
        due,
        lambda: _curvature(problem, state, weight, carried),
        lambda: newton.complete,
    )
    each = jnp.einsum("jcn,jcnp->cp", pool(weight), rate)
    rough = pooled + each.T @ each
    overshot = score @ newton.last_step > 0
    kinked = em.is_kinked(newton, complete, rough, overshot, len(each))
    by_scores = jnp.where(due, kinked, newton.by_scores)
    complete = jnp.where(due & kinked, rough, complete)
    missing = em.remember(newton, jnp.where(tempered, within, pooled), tempered)
    info = em.information_basis(complete, missing, em.floor_for(tempered))
    newton_decrement = em.decrement(info, score)
    is_far = newton_decrement > _hold_above(temperature)
    moving = (stage != REST) & jnp.all(temperature > 0)
    # The maximum of a flattened likelihood may lie in another valley: parameters that
    # are not far off move in earnest only as the temperature does.
    haste = jnp.where(is_far, 1.0, jnp.mean(temperature))
    share = jnp.where(moving, haste * em.gain(newton), 0.0)
    reach = jnp.where(problem.is_free, 1 + jnp.abs(state.target.params), 0.7)

    def trusted(allowed: Array) -> Array:
        return em.trusted_step(info, score, share, allowed, reach)

    # Islands at different temperatures differ by more than what any of them pays. To
    # count that as well is careful, but would hold up parameters that are far off.
    is_rough = tempered & is_far
    cost = jnp.where(is_rough, within, pooled) / temperature.shape[1]
    step, spent = _affordable(weight, carried.rate, trusted, cost, tempered, is_rough)
    reversed_ = (stage == EM_STEP) & em.turned_back(newton, step)
    is_early = jnp.mean(temperature) < _EARLY
    reversals = newton.reversals + reversed_
    memory = em.Newton(complete, missing, reversals, step, is_early, by_scores)
    return step, score, memory, newton_decrement, spent


def _affordable(
    weight: Array,
    rates: Array,
    trusted: Callable[[Array], Array],
    cost: Array,
    tempered: Array,
    is_rough: Array,
) -> tuple[Array, Array]:
    """Return the step of the parameters that the weights can bear, and what it costs.

    Parameters
    ----------
    rates
        Of the log-weights with the temperature and the parameters, in columns.
    trusted
        The best step for a matrix of costs.
    cost
        Variance of the log-weights that a step causes, averaged over components.
    """
    # What a change of parameters costs may be offset by raising the temperature with it.
    against, saved = _offset(weight, rates, is_rough)
    nothing = jnp.zeros(cost.shape[:1], cost.dtype)
    bold = lax.cond(tempered, lambda: trusted(cost - saved), lambda: nothing)
    offsets = tempered & (jnp.mean(against @ bold < 0) > 0.5)
    step = jnp.where(offsets, bold, trusted(cost))
    spent = step @ jnp.where(offsets, cost - saved, cost) @ step
    if weight.shape[1] > 1:
        change = rates[..., 1:] @ step
        inside = transport.within(weight, change[..., None])[..., 0]
        worst = _worst_variance(weight, jnp.where(is_rough, inside, change))
        step = em.shorten(step, jnp.where(offsets, 0.0, worst), _MOST_VARIANCE)
    return step, spent


def _offset(weight: Array, rate: Array, is_rough: Array) -> tuple[Array, Array]:
    """Return how the rates of the parameters go with that of the temperature.

    Their covariances in each component, (components, num_params), and the variance that a
    change of the temperature could take away, averaged over components.
    """
    values = jnp.where(is_rough, transport.within(weight, rate), rate)
    against = transport.products(weight, values[..., :1], values)
    slope, rest = against[:, 0], against[:, 1:]
    share = rest / jnp.maximum(slope, 1e-30)[:, None]
    return rest, share.T @ rest / len(slope)


def _worst_variance(weight: Array, change: Array) -> Array:
    """Return the largest variance that a change of the potentials causes in a component."""
    return jnp.max(transport.variance(weight, change[..., None]))


def _curvature(
    problem: Problem, state: State, weight: Array, carried: transport.Transport
) -> Array:
    """Return the mean second derivative of the potential in the parameters.

    The particles follow the parameters, to first order as they would in a step.
    """

    def motion(directions: Array, position: Array) -> Array:
        moved = -jnp.einsum("jpd,jp->jd", carried.shift[:, 1:], directions)
        return jnp.broadcast_to(moved[:, None], position.shape)

    of_block = partial(second_derivative, problem.potential_fn, state.target, motion)
    by_particle = jnp.swapaxes(pool(weight), 1, 2)
    position = state.cloud.position
    return blocks.total(of_block, problem.block, by_particle, position).sum(0)


def _optimiser_step(
    problem: Problem,
    settings: Settings,
    state: State,
    weight: Array,
    score_fn: evaluation.ScoreFn,
    stage: Array,
) -> tuple[Array, Array, Any]:
    """Return the step of a given optimiser, the score, and the optimiser's state."""
    assert settings.optimiser is not None
    params, pooled = state.target.params, pool(weight)
    score = score_fn(pooled)
    new, optim_state = settings.optimiser.step(
        problem.unravel(score), state.optim_state, problem.unravel(params)
    )
    step = problem.ravel(new) - params
    if settings.trusted:
        each = jax.vmap(problem.potential_fn, (None, None, 0))
        all_fn = jax.vmap(each, (None, 0, 0))

        def potentials(values: Array) -> Array:
            return all_fn(values, state.target.temperature, state.cloud.position)

        _, change = jax.jvp(potentials, (params,), (step,))
        spread = _worst_variance(weight, jnp.swapaxes(change, 1, 2))
        step = em.shorten(step, spread, em.TRUST)
    moving = (stage == EM_STEP) | (
        (stage == ANNEAL) & jnp.all(state.plan.target.temperature >= 1)
    )
    keep = jax.tree.map(
        lambda a, b: jnp.where(moving, a, b), optim_state, state.optim_state
    )
    return jnp.where(moving, step, 0.0), score, keep
