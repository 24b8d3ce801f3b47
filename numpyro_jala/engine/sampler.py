"""Walk along a path of targets: to the posterior, then up the likelihood.

One step serves every stage. It moves the particles to the target that was planned, weighs
them, and plans the next target on the weights before their resampling.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import share, spread
from numpyro_jala.engine import em, smc
from numpyro_jala.engine.adaptation import (
    MOVE_VARIANCE,
    gaussian_step_size,
    momentum_memory,
    others,
    others_mean,
    refusal_variance,
    rounding_variance,
    step_size_vote,
    tested_stretch,
    weight_variance,
)
from numpyro_jala.engine.geometry import is_collapsed, others_factor
from numpyro_jala.engine.langevin import Kernel, draw_noise
from numpyro_jala.engine.planner import plan
from numpyro_jala.engine.resampling import SCHEMES
from numpyro_jala.engine.smc import Cloud, Target
from numpyro_jala.engine.state import (
    ASCEND,
    CLIMB,
    HOLD,
    REST,
    Info,
    Plan,
    Problem,
    Settings,
    State,
    traced,
)
from numpyro_jala.engine.weights import normalise

_FACTOR_EVERY = 5
#: From fewer particles than this the shape of the posterior is averaged over moves.
_ENOUGH_DRAWS = 25


def _evaluate(
    problem: Problem, settings: Settings, target: Target, position: Array
) -> tuple[smc.Derivatives, smc.ScoreFn]:
    each, rough = settings.newton, problem.rough_gradient
    return smc.evaluate(problem.potential_fn, target, position, each, rough, problem.block)


@exactly
def start(
    rng_key: PRNGKey,
    problem: Problem,
    settings: Settings,
    target: Target,
    position: Array,
    log_evidence: Array,
    ascends: bool,
) -> State:
    """Begin with draws from the first target, whose log-evidence is known.

    Unless the parameters are to ascend at once, the particles move before anything is
    planned, and so ``num_moves`` starts at one.
    """
    position = spread(position)
    found, score_fn = _evaluate(problem, settings, target, position)
    dtype, (num_islands, num_particles, dim) = position.dtype, position.shape
    rng_key, momentum_key = random.split(rng_key)
    # What adapts nothing is the paper's algorithm, which draws its noise anew.
    shape = (num_islands, num_particles, dim if settings.adapts else 0)
    momentum = spread(draw_noise(momentum_key, shape, dtype))
    cloud = smc.start(position, momentum, found, log_evidence)
    weight = normalise(cloud.log_weight)
    factor = jnp.ones((num_islands,), dtype)
    if settings.adapts:
        dense = settings.preconditioner == "dense"
        factor = others_factor(weight, position, cloud.gradient, dense)
    size = settings.step_size or gaussian_step_size(dim)
    num_params = target.params.size
    if settings.newton:
        optim_state: Any = em.start_newton(num_params, dtype)
    else:
        assert settings.optimiser is not None
        optim_state = settings.optimiser.init(problem.unravel(target.params))
    columns = 1 + num_params * settings.newton
    blank = State(
        rng_key=rng_key,
        num_moves=jnp.asarray(0 if ascends else 1, int),
        num_steps=jnp.zeros((), int),
        target=target,
        plan=Plan(
            target,
            jnp.zeros((num_islands, dim, columns), dtype),
            jnp.zeros((num_islands, dim, columns), dtype),
            jnp.zeros((num_params,), dtype),
            jnp.zeros((), dtype),
            jnp.zeros((), dtype),
        ),
        cloud=cloud,
        log_step_size=jnp.full((num_islands,), jnp.log(size), dtype),
        factor=factor,
        optim_state=optim_state,
        mean_params=target.params,
    )
    blank = _spread_state(blank)
    if not ascends:
        return blank
    stage = jnp.asarray(ASCEND)
    first, optim_state = plan(problem, settings, blank, score_fn, stage)
    return blank._replace(plan=first, optim_state=optim_state)


def _agreed_step_size(settings: Settings, state: State) -> Array:
    """Return for each island the step size that the others can bear."""
    own = state.log_step_size
    if settings.step_size is not None:
        return jnp.exp(own)
    alive = jnp.isfinite(state.cloud.log_weight).any(-1)
    # The last island alive has nobody left to ask.
    return jnp.exp(jnp.where(others(alive) > 0, others_mean(own, alive), own))


def _stretch(
    settings: Settings, step_size: Array, ascending: Array, standing: Array
) -> Array:
    """Return by how much each island's next step is longer than what was agreed."""
    given = settings.step_size is not None
    tested = jnp.ones_like(step_size) if given else tested_stretch(step_size)
    return jnp.where(ascending, 1.0, jnp.where(standing, tested, 0.0))


def _kernel(
    settings: Settings, state: State, target: Target, step_size: Array, ascending: Array
) -> tuple[Kernel, Array]:
    """Return how the islands move to a target, and the change of the target."""
    temperature_change = target.temperature - state.target.temperature
    columns = [temperature_change[:, None]]
    if settings.newton:
        params_change = target.params - state.target.params
        shape = (settings.num_islands, params_change.size)
        columns.append(jnp.broadcast_to(params_change, shape))
    change = jnp.concatenate(columns, -1)
    shift = -jnp.einsum("jdc,jc->jd", state.plan.transport_shift, change)
    memory = jnp.where(ascending, 0.0, momentum_memory(step_size))
    return Kernel(step_size, state.factor, shift, memory), change


def _moves_target(settings: Settings, state: State, stage: Array) -> Array:
    """Tell whether the next step goes to the planned target."""
    period = jnp.where(stage == REST, 2, 1 + settings.moves_per_temperature)
    return (stage == ASCEND) | (state.num_moves % period == 0)


def _will_move(settings: Settings, state: State, stage: Array, wait: Array) -> Array:
    """Tell whether a plan would be carried out."""
    anneals = ((stage == CLIMB) | (stage == HOLD)) & jnp.any(state.target.temperature < 1)
    stands = ~_moves_target(settings, state, stage)
    return ~(anneals & stands) & ~((stage == REST) & (wait <= 0))


def _next_target(
    settings: Settings, state: State, stage: Array, goal: Array, wait: Array
) -> tuple[Target, Array]:
    """Return the next target, and whether it is the one where the particles stand.

    Short of the ascent the particles and their target take turns: a target that moves
    while they stand still costs the weights least, and a target that stands still allows
    a Metropolis test.
    """
    resting = stage == REST
    arrived = resting & (wait <= 0)
    standing = arrived | ~_moves_target(settings, state, stage)
    here, turns = state.target.params, (wait + 1) // 2
    approach = here + (goal - here) / jnp.maximum(turns, 1)
    params = jnp.where(resting, approach, state.plan.target.params)
    next_ = Target(params, state.plan.target.temperature)
    target = jax.tree.map(lambda a, b: jnp.where(standing, a, b), state.target, next_)
    return target, standing


@exactly
def step(
    problem: Problem,
    settings: Settings,
    state: State,
    stage: Array,
    goal: Array,
    wait: Array,
) -> tuple[State, Info]:
    """Move to the planned target and plan the next.

    Parameters
    ----------
    stage
        ``REST``, ``CLIMB``, ``HOLD`` or ``ASCEND``.
    goal, wait
        At rest the parameters reach ``goal`` after ``wait`` steps.
    """
    rng_key, move_key, resample_key = random.split(state.rng_key, 3)
    ascending = stage == ASCEND
    target, standing = _next_target(settings, state, stage, goal, wait)
    agreed = _agreed_step_size(settings, state)
    stretch = _stretch(settings, agreed, ascending, standing)
    kernel, change = _kernel(settings, state, target, stretch * agreed, ascending)
    cloud, score_fn, info = smc.step(
        move_key,
        state.cloud,
        kernel,
        lambda x: _evaluate(problem, settings, target, x),
        standing,
    )
    # A large step of the parameters is not linear: what it costs is not the move's fault.
    blind = (stretch == 0) | (ascending & (state.plan.cost > 0.01))
    increment = _due_to_move(kernel, cloud, info.increment, change)
    vote = _vote(settings, state, agreed, stretch, increment, standing)
    num_steps = state.num_steps + ascending
    mean = em.average(state.mean_params, target.params, num_steps)
    moved = State(
        rng_key=rng_key,
        num_moves=state.num_moves + 1,
        num_steps=num_steps,
        target=target,
        plan=state.plan,
        cloud=cloud,
        log_step_size=jnp.where(blind, state.log_step_size, vote),
        factor=_refresh_factor(settings, state, cloud),
        optim_state=state.optim_state,
        mean_params=jnp.where(ascending, mean, target.params),
    )
    planned, optim_state = _plan(problem, settings, moved, score_fn, stage, wait)
    cloud, resampled = _resample(settings, resample_key, cloud, standing)
    new = moved._replace(plan=planned, cloud=cloud, optim_state=optim_state)
    report = Info(
        params=traced(target.params),
        temperature=target.temperature,
        log_evidence=smc.log_evidence(cloud),
        ess=info.ess,
        resampled=resampled,
        step_size=kernel.step_size,
        grad_norm=jnp.linalg.norm(planned.score),
        promise=planned.promise,
        died=info.died,
    )
    return _spread_state(new), share(report)


def _plan(
    problem: Problem,
    settings: Settings,
    moved: State,
    score_fn: smc.ScoreFn,
    stage: Array,
    wait: Array,
) -> tuple[Plan, Any]:
    """Plan the next target if there will be one."""

    def afresh() -> tuple[Plan, Any]:
        return plan(problem, settings, moved, score_fn, stage)

    if not (settings.adapts or settings.newton or settings.trusted):
        return afresh()  # an accelerator takes longer to ask whether it is needed
    needed = _will_move(settings, moved, stage, wait - 1)
    return lax.cond(needed, afresh, lambda: (moved.plan, moved.optim_state))


def _resample(
    settings: Settings, rng_key: PRNGKey, cloud: Cloud, standing: Array
) -> tuple[Cloud, Array]:
    """Resample where it is due: not at a target that stands, which leaves the weights."""
    scheme = SCHEMES[settings.resampling]
    due = smc.is_due(cloud, settings.ess_threshold) & ~standing
    # Most steps resample nothing.
    cloud = smc.change_if(
        due.any(), lambda all_: smc.resample(rng_key, all_, scheme, due), cloud
    )
    return cloud, due


def _spread_state(state: State) -> State:
    """Keep what belongs to an island where its particles are, and the rest everywhere."""
    plan, shares = state.plan, share(state)
    return shares._replace(
        cloud=spread(state.cloud),
        log_step_size=spread(state.log_step_size),
        factor=spread(state.factor),
        plan=shares.plan._replace(
            transport_shift=spread(plan.transport_shift),
            transport_learned=spread(plan.transport_learned),
        ),
    )


def _due_to_move(kernel: Kernel, cloud: Cloud, increment: Array, change: Array) -> Array:
    """Return the log-weights without what the target's change has caused."""
    increment = increment + jnp.einsum("jnc,jc->jn", cloud.rates, change)
    # As a product of matrices this would have the particles transposed on a GPU.
    return increment + jnp.sum(cloud.gradient * kernel.shift[:, None], -1)


def _vote(
    settings: Settings,
    state: State,
    agreed: Array,
    stretch: Array,
    increment: Array,
    standing: Array,
) -> Array:
    """Let each island say which step size it could bear."""
    if settings.step_size is not None:
        return state.log_step_size
    weight = normalise(state.cloud.log_weight)
    refusals = refusal_variance(weight, increment)
    refusals -= rounding_variance(weight, state.cloud.potential)
    variance = jnp.where(standing, refusals, weight_variance(weight, increment))
    return step_size_vote(jnp.log(agreed), variance, MOVE_VARIANCE * stretch**3)


def _averaged(factor: Array, state: State) -> Array:
    """Average a new factor with the last, if it comes from a handful of particles.

    Those may be near copies of each other for a while. An island that took their shape
    for the posterior's would freeze, or throw its particles about, and the parameters
    would go astray with it. While annealing the shape itself changes.
    """
    num_islands, num_particles = state.cloud.log_weight.shape
    num_others = (num_islands - 1) * num_particles
    if num_others >= _ENOUGH_DRAWS:
        return factor
    mixed = state.factor + num_others / _ENOUGH_DRAWS * (factor - state.factor)
    anew = jnp.any(state.target.temperature < 1) | ~jnp.isfinite(state.factor)
    return jnp.where(anew, factor, mixed)


def _refresh_factor(settings: Settings, state: State, cloud: Cloud) -> Array:
    if not settings.adapts:
        return state.factor
    dense = settings.preconditioner == "dense"
    weight = normalise(cloud.log_weight)

    def fresh() -> Array:
        factor = others_factor(weight, cloud.position, cloud.gradient, dense)
        lost = is_collapsed(factor, state.factor)
        return jnp.where(lost, state.factor, _averaged(factor, state))

    return lax.cond(state.num_moves % _FACTOR_EVERY == 0, fresh, lambda: state.factor)
