"""The end of a fit as pure functions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.backend.sharding import on_mesh
from numpyro_jala.engine import em, mixture, sampler
from numpyro_jala.engine.state import REST, State
from numpyro_jala.inference import (
    estimation,
    importance,
    modes,
    newton,
    programs,
    snapshots,
)
from numpyro_jala.inference.draws import define_draws, num_for_score
from numpyro_jala.inference.estimation import Score
from numpyro_jala.inference.programs import CLOUDS, SETTLE, Data, Fixed
from numpyro_jala.inference.rest import FORGOTTEN, ROUNDS, forget
from numpyro_jala.inference.snapshots import Snapshot


class _Settling(NamedTuple):
    """Particles on the way to rest."""

    state: State
    num_rounds: Array  # ()
    left: Array  # (dim,), of their first deviations


def _is_unsettled(carry: _Settling) -> Array:
    return (carry.left.max() > FORGOTTEN) & (carry.num_rounds < len(ROUNDS))


def settle(
    fixed: Fixed, data: Data, state: State
) -> tuple[Array, Array | np.ndarray, Array | np.ndarray, State]:
    """Rest at the estimate and find the evidence and its error there."""
    rng_key, bridge_key = random.split(random.fold_in(state.rng_key, 1))
    score_key, bridge_key = random.split(bridge_key)
    params, is_joint = programs.best_params(fixed, state), fixed.layout.partition.is_joint
    state = _go(fixed, data, state._replace(rng_key=rng_key), params)
    if fixed.settings.newton and params.size and not is_joint:
        params = _climb(fixed, data, state, params, score_key)
        state = _go(fixed, data, state, params)
    state, clouds = _stay(fixed, data, state, params)
    evidence = _of_one if is_joint else _of_several
    return params, *evidence(fixed, data, params, bridge_key, clouds), state


def _rest(
    fixed: Fixed, data: Data, state: State, params: Array, num_steps: int | Array, wait: int
) -> State:
    """Move the particles at the parameters, where these are after a while."""
    problem, stage = programs.problem_of(fixed, data), jnp.asarray(REST)

    def body(count: int, here: State) -> State:
        left = jnp.asarray(wait) - count
        return sampler.step(problem, fixed.settings, here, stage, params, left)[0]

    return lax.fori_loop(0, num_steps, body, state)


@compilation.program(static_argnums=0)
@on_mesh
def _go(fixed: Fixed, data: Data, state: State, params: Array) -> State:
    """Bring the particles to the parameters, a bit at each step; without any see `_stay`."""
    if not params.size and fixed.layout.partition.is_joint:
        return state
    return _rest(fixed, data, state, params, SETTLE, SETTLE if params.size else 0)


@compilation.program(static_argnums=0)
@on_mesh
def _stay(
    fixed: Fixed, data: Data, state: State, params: Array
) -> tuple[State, list[Snapshot]]:
    """Rest at the parameters, one component as long as it takes, and keep clouds."""

    def settle_more(carry: _Settling) -> _Settling:
        current, index, left = carry
        after = _rest(fixed, data, current, params, jnp.asarray(ROUNDS)[index], 0)
        return _Settling(after, index + 1, forget(left, current.cloud, after.cloud))

    def keep(current: State, _: None) -> tuple[State, Snapshot]:
        current = _rest(fixed, data, current, params, programs.num_apart(fixed), 0)
        return current, snapshots.take(current.cloud, fixed.layout.partition)

    if fixed.layout.partition.is_joint:
        first = _Settling(state, jnp.zeros((), int), jnp.ones(fixed.layout.dim))
        state = lax.while_loop(_is_unsettled, settle_more, first).state
    state, kept = lax.scan(keep, state, length=CLOUDS)
    return state, [jax.tree.map(lambda leaf, i=i: leaf[i], kept) for i in range(CLOUDS)]


def _climb(
    fixed: Fixed, data: Data, state: State, params: Array, rng_key: PRNGKey
) -> Array:
    """Take Newton steps on draws, by the information that the EM steps have learned.

    Only where there were such steps, and no further than the particles can follow.
    """
    clouds = [snapshots.take(state.cloud, fixed.layout.partition)]
    gaussian, level = estimation.fit_loo(fixed, clouds)
    num_draws = num_for_score(fixed)
    draws = define_draws(fixed, rng_key, num_draws, gaussian, level, params)
    learned = state.optim_state
    info = em.information_basis(learned.complete, learned.missing, em.FLOOR)
    covariance = info.basis / info.observed @ info.basis.T

    def score_at(values: Array) -> Score:
        return estimation.score(fixed, data, values, draws)

    better = newton.few_steps(score_at, params, covariance)
    num_components = fixed.layout.partition.num_components
    follows = em.is_near(learned, better - params, SETTLE // 2, num_components)
    return jnp.where(follows & (state.num_steps > 0), better, params)


def _of_one(
    fixed: Fixed, data: Data, params: Array, rng_key: PRNGKey, clouds: list[Snapshot]
) -> tuple[Array, Array]:
    """Return the log-evidence and its standard error, all latents being one component."""
    bridge_key, draw_key = random.split(rng_key)
    gaussian, level = estimation.fit_loo(fixed, clouds)
    bridge = estimation.bridge_to(fixed, bridge_key, data, params, clouds, gaussian, level)
    log_evidence, error = jnp.asarray(bridge.log_evidence), bridge.standard_error
    if mixture.serves(fixed.layout.partition):
        drawn = modes.estimate(modes.weigh(fixed, draw_key, data, params, clouds, level))
        takes_draws = modes.choose(bridge, drawn, level[0]).takes_draws
        log_evidence = jnp.where(takes_draws, drawn.log_evidence, log_evidence)
        error = jnp.where(takes_draws, drawn.standard_error, error)
    return log_evidence - level[0], jnp.asarray(error)


def _of_several(
    fixed: Fixed, data: Data, params: Array, rng_key: PRNGKey, clouds: list[Snapshot]
) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Return the log-evidence of several components and its standard error."""
    gaussian, level = estimation.fit_loo(fixed, clouds)
    num_draws = fixed.settings.num_draws
    draws = define_draws(fixed, rng_key, num_draws, gaussian, level, params)
    sampled = estimation.sample(fixed, data, params, draws, clouds)
    bridge = importance.summed(sampled, level)
    return bridge.log_evidence, bridge.standard_error
