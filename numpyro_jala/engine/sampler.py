"""Walk along a path of targets: to the posterior, then up the likelihood.

One step serves every stage. It moves the particles to the target that was planned, weighs
them, and plans the next target on the weights before their resampling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.memory import change_if
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import share, spread
from numpyro_jala.engine import em, evaluation, mixture, smc, turns
from numpyro_jala.engine.adaptation import (
    MOVE_VARIANCE,
    adapt_step_size,
    gaussian_step_size,
    momentum_memory,
    refusal_variance,
    rounding_variance,
    weight_variance,
)
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import IDENTITY, Factor
from numpyro_jala.engine.geometry import is_collapsed, loo_factor
from numpyro_jala.engine.langevin import Kernel, draw_noise
from numpyro_jala.engine.loo import loo_island_mean, loo_sum
from numpyro_jala.engine.planner import plan
from numpyro_jala.engine.resampling import SCHEMES
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.state import (
    EM_STEP,
    REST,
    Info,
    Plan,
    Problem,
    Settings,
    State,
    traced,
)
from numpyro_jala.engine.weights import log_mean_exp, normalise

_FACTOR_EVERY = 5
#: From fewer particles than this the shape of the posterior is averaged over moves.
_ENOUGH_DRAWS = 25


def _evaluate(
    problem: Problem, settings: Settings, target: Target, position: Array
) -> tuple[evaluation.Derivatives, evaluation.ScoreFn]:
    return evaluation.evaluate_model(
        problem.potential_fn,
        problem.partition,
        target,
        position,
        settings.newton,
        problem.scores_at_once,
        problem.rough_gradient,
        problem.block,
    )


@exactly
def initial_state(
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
    position, problem = spread(position), problem.near(target.params)
    found, score_fn = _evaluate(problem, settings, target, position)
    dtype, (num_islands, num_particles, dim) = position.dtype, position.shape
    rng_key, momentum_key = random.split(rng_key)
    # What adapts nothing is the paper's algorithm, which draws its noise anew.
    shape = (num_islands, num_particles, dim if settings.adapts else 0)
    momentum = spread(draw_noise(momentum_key, shape, dtype))
    partition = problem.partition
    cloud = smc.initial_cloud(partition, position, momentum, found, log_evidence)
    sizes = settings.step_size or gaussian_step_size(partition.sizes)
    by_component = (num_islands, partition.num_components)
    blank = State(
        rng_key=rng_key,
        num_moves=jnp.asarray(0 if ascends else 1, int),
        num_steps=jnp.zeros((), int),
        target=target,
        plan=_no_plan(settings, target, position),
        cloud=cloud,
        log_step_size=jnp.broadcast_to(jnp.log(jnp.asarray(sizes, dtype)), by_component),
        factor=_learn_factor(problem, settings, cloud),
        optim_state=_first_optim_state(problem, settings, target.params),
        mean_params=target.params,
    )
    blank = _spread_state(blank)
    if not ascends:
        return blank
    scored = _with_scores(problem, settings, blank.cloud, target, jnp.asarray(True))
    blank = blank._replace(cloud=scored)
    stage = jnp.asarray(EM_STEP)
    first, optim_state = plan(problem, settings, blank, score_fn, stage)
    return blank._replace(plan=first, optim_state=optim_state)


def _learn_factor(problem: Problem, settings: Settings, cloud: Cloud) -> Factor:
    """Learn the shape of each component's posterior, if it is to be learned."""
    if settings.most_dense is None:
        return IDENTITY
    weight = normalise(cloud.log_weight)
    return loo_factor(
        weight, cloud.position, cloud.gradient, problem.partition, settings.most_dense
    )


def _no_plan(settings: Settings, target: Target, position: Array) -> Plan:
    """Plan to stay at a target."""
    num_params, dtype = target.params.size, position.dtype
    columns = 1 + num_params * settings.newton
    shift = jnp.zeros((len(position), columns, position.shape[-1]), dtype)
    zero = jnp.zeros((), dtype)
    return Plan(target, shift, shift, jnp.zeros((num_params,), dtype), zero, zero)


def _first_optim_state(problem: Problem, settings: Settings, params: Array) -> Any:
    if settings.newton:
        return em.start_newton(params.size, params.dtype)
    assert settings.optimiser is not None
    return settings.optimiser.init(problem.unravel(params))


def _loo_step_size(settings: Settings, state: State) -> Array:
    """Return for each island the step size that the others can bear."""
    own = state.log_step_size
    if settings.step_size is not None:
        return jnp.exp(own)
    alive = jnp.isfinite(state.cloud.log_weight).any(-1)
    # With a single living island there is no leave-one-out mean.
    return jnp.exp(jnp.where(loo_sum(alive) > 0, loo_island_mean(own, alive), own))


def _kernel(
    problem: Problem,
    settings: Settings,
    state: State,
    target: Target,
    step_size: Array,
    ascending: Array,
) -> tuple[Kernel, Array]:
    """Return how the islands move to a target, and the change of the target.

    The change is (num_islands, components, columns): the temperature's and, where every
    particle's score is known, the parameters'.
    """
    temperature_change = target.temperature - state.target.temperature
    columns = [temperature_change[..., None]]
    if settings.newton:
        params_change = target.params - state.target.params
        shape = (*temperature_change.shape, params_change.size)
        columns.append(jnp.broadcast_to(params_change, shape))
    change = jnp.concatenate(columns, -1)
    by_coordinate = problem.partition.spread(jnp.swapaxes(change, 1, 2))
    shift = -jnp.sum(state.plan.transport_shift * by_coordinate, 1)
    memory = jnp.where(ascending, 0.0, momentum_memory(step_size))
    return Kernel(step_size, state.factor, shift, memory), change


def _jumps(
    rng_key: PRNGKey,
    problem: Problem,
    settings: Settings,
    state: State,
    stage: Array,
    fixed_target: Array,
) -> smc.Jumps | None:
    """Draw proposals from a mixture, every other pair of moves at rest; None if never.

    Not while annealing: there they tie the islands to each other, whose spread is the error
    of the evidence along the path.
    """
    enough = settings.num_particles >= 2 * problem.partition.dim
    learns = settings.adapts and settings.num_islands > 1
    if not (learns and enough and mixture.serves(problem.partition)):
        return None
    turn = state.num_moves // turns.period(settings, stage) % 2 == 1
    needed = fixed_target & (stage == REST) & turn
    return smc.draw_jumps(rng_key, state.cloud, needed)


def _with_scores(
    problem: Problem, settings: Settings, cloud: Cloud, target: Target, needed: Array
) -> Cloud:
    """Find the scores that are found apart, if a plan needs them."""
    if problem.scores_at_once or not settings.newton:
        return cloud

    def fresh() -> Array:
        return evaluation.evaluate_scores(
            problem.potential_fn, target, cloud.position, problem.block
        )[1]

    alive = jnp.isfinite(cloud.log_weight)[..., None]
    scores = lax.cond(needed, fresh, lambda: cloud.scores)
    return cloud._replace(scores=jnp.where(alive, scores, 0.0))


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
        ``REST``, ``ANNEAL``, ``ANNEAL_FIXED`` or ``EM_STEP``.
    goal, wait
        At rest the parameters reach ``goal`` after ``wait`` steps.
    """
    rng_key, move_key, resample_key, jump_key = random.split(state.rng_key, 4)
    target, fixed_target = turns.next_target(settings, state, stage, goal, wait)
    problem = problem.near(target.params)
    needed = turns.will_move(settings, state, target, stage, wait)
    jumps = _jumps(jump_key, problem, settings, state, stage, fixed_target)
    way = _Way(target, fixed_target, stage == EM_STEP, needed)
    cloud, log_step_size, score_fn, info = _move(
        move_key, problem, settings, state, way, jumps
    )
    num_steps = state.num_steps + (way.ascending & ~fixed_target)
    mean = em.average(state.mean_params, target.params, num_steps)
    mean = jnp.where(fixed_target, state.mean_params, mean)
    moved = State(
        rng_key=rng_key,
        num_moves=state.num_moves + 1,
        num_steps=num_steps,
        target=target,
        plan=state.plan,
        cloud=cloud,
        log_step_size=log_step_size,
        factor=_refresh_factor(problem, settings, state, cloud),
        optim_state=state.optim_state,
        mean_params=jnp.where(way.ascending, mean, target.params),
        mode=state.mode,
        num_scaled=state.num_scaled,
    )
    planned, optim_state = _plan(problem, settings, moved, score_fn, stage, needed)
    cloud, resampled = _resample(problem, settings, resample_key, cloud, fixed_target)
    new = moved._replace(plan=planned, cloud=cloud, optim_state=optim_state)
    report = _report(new, info[0], resampled, info[1])
    return _spread_state(new), share(report)


class _Way(NamedTuple):
    """Where a step goes."""

    target: Target
    fixed_target: Array  # (), the particles stand there already
    ascending: Array  # ()
    needs_scores: Array  # (), to plan the next step


def _move(
    rng_key: PRNGKey,
    problem: Problem,
    settings: Settings,
    state: State,
    way: _Way,
    jumps: smc.Jumps | None,
) -> tuple[Cloud, Array, evaluation.ScoreFn, tuple[smc.StepInfo, Array]]:
    """Move the particles and learn from it; also return the step sizes they had."""
    target, fixed_target, ascending, needs_scores = way
    loo_step_size = _loo_step_size(settings, state)
    multiplier = turns.step_multiplier(settings, loo_step_size, ascending, fixed_target)
    kernel, change = _kernel(
        problem, settings, state, target, multiplier * loo_step_size, ascending
    )
    cloud, score_fn, info = smc.step(
        rng_key,
        problem.partition,
        state.cloud,
        kernel,
        lambda x: _evaluate(problem, settings, target, x),
        fixed_target,
        jumps,
    )
    cloud = _with_scores(problem, settings, cloud, target, needs_scores)
    # A large step of the parameters is not linear: what it costs is not the move's fault.
    is_confounded = (multiplier == 0) | (
        ascending & ~fixed_target & (state.plan.cost > 0.01)
    )
    if jumps is not None:
        is_confounded |= jumps.needed
    increment = _due_to_move(problem, kernel, cloud, info.increment, change)
    adapted = _adapt_step_size(
        settings, state, loo_step_size, multiplier, increment, fixed_target
    )
    log_step_size = jnp.where(is_confounded, state.log_step_size, adapted)
    return cloud, log_step_size, score_fn, (info, kernel.step_size)


def _report(state: State, info: smc.StepInfo, resampled: Array, step_size: Array) -> Info:
    log_evidence, error = path_evidence(state.cloud)
    return Info(
        params=traced(state.target.params),
        temperature=state.target.temperature.min(),
        log_evidence=log_evidence,
        log_evidence_se=error,
        ess=jnp.median(info.ess.mean(0)),
        ess_lowest=info.ess.min(),
        resampled=resampled.mean(dtype=step_size.dtype),
        step_size=step_size.mean(),
        grad_norm=jnp.linalg.norm(state.plan.score),
        newton_decrement=state.plan.newton_decrement,
        died=info.died,
    )


def path_evidence(cloud: Cloud) -> tuple[Array, Array]:
    """Return the log-evidence along the path, and its standard error from the islands.

    The logarithm of a mean is low by half its relative variance, which over many
    components would add up: it is taken out.
    """
    each = smc.log_evidence(cloud)
    num_islands, num_components = each.shape
    pooled = log_mean_exp(each.T)
    if num_islands == 1:
        return pooled.sum(), jnp.zeros((), pooled.dtype)
    ratio = jnp.exp(each - jnp.where(jnp.isfinite(pooled), pooled, 0.0))
    variance = jnp.var(ratio, 0, ddof=1) / num_islands
    correction = variance.sum() / 2 if num_components > 1 else 0.0
    return pooled.sum() + correction, jnp.sqrt(variance.sum())


def _plan(
    problem: Problem,
    settings: Settings,
    moved: State,
    score_fn: evaluation.ScoreFn,
    stage: Array,
    needed: Array,
) -> tuple[Plan, Any]:
    """Plan the next target if there will be one."""

    def afresh() -> tuple[Plan, Any]:
        return plan(problem, settings, moved, score_fn, stage)

    if not (settings.adapts or settings.newton or settings.trusted):
        return afresh()  # an accelerator takes longer to ask whether it is needed
    return lax.cond(needed, afresh, lambda: (moved.plan, moved.optim_state))


def _resample(
    problem: Problem,
    settings: Settings,
    rng_key: PRNGKey,
    cloud: Cloud,
    fixed_target: Array,
) -> tuple[Cloud, Array]:
    """Resample where it is due: not at a target that stands, which leaves the weights."""
    scheme = SCHEMES[settings.resampling]
    due = smc.is_due(cloud, settings.ess_threshold) & ~fixed_target
    # Most steps resample nothing.
    cloud = change_if(
        due.any(),
        lambda all_: smc.resample(rng_key, problem.partition, all_, scheme, due),
        cloud,
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


def _due_to_move(
    problem: Problem, kernel: Kernel, cloud: Cloud, increment: Array, change: Array
) -> Array:
    """Return the log-weights without what the target's change has caused."""
    increment = increment + jnp.einsum("jcnk,jck->jcn", cloud.rates, change)
    # As a product of matrices this would have the particles transposed on a GPU.
    return increment + problem.partition.total(cloud.gradient * kernel.shift[:, None])


def _adapt_step_size(
    settings: Settings,
    state: State,
    loo_step_size: Array,
    multiplier: Array,
    increment: Array,
    fixed_target: Array,
) -> Array:
    """Let each island say which step size it could bear."""
    if settings.step_size is not None:
        return state.log_step_size
    weight = normalise(state.cloud.log_weight)
    refusals = refusal_variance(weight, increment)
    refusals -= rounding_variance(weight, state.cloud.potential)
    variance = jnp.where(fixed_target, refusals, weight_variance(weight, increment))
    return adapt_step_size(jnp.log(loo_step_size), variance, MOVE_VARIANCE * multiplier**3)


def _averaged(block: Array, last: Array, state: State) -> Array:
    """Average a new block of the factor with the last, if it comes from few particles.

    Few particles may be near copies of each other for a while, and their covariance is
    then far from the posterior's. While annealing the covariance itself changes.
    """
    num_islands, _, num_particles = state.cloud.log_weight.shape
    num_loo = (num_islands - 1) * num_particles
    if num_loo >= _ENOUGH_DRAWS:
        return block
    mixed = last + num_loo / _ENOUGH_DRAWS * (block - last)
    anew = jnp.any(state.target.temperature < 1) | ~jnp.isfinite(last)
    return jnp.where(anew, block, mixed)


def _refresh_factor(
    problem: Problem, settings: Settings, state: State, cloud: Cloud
) -> Factor:
    if settings.most_dense is None:
        return state.factor

    def one(block: Array, last: Array) -> Array:
        return jnp.where(is_collapsed(block, last), last, _averaged(block, last, state))

    def fresh() -> Factor:
        return jax.tree.map(one, _learn_factor(problem, settings, cloud), state.factor)

    return lax.cond(state.num_moves % _FACTOR_EVERY == 0, fresh, lambda: state.factor)
