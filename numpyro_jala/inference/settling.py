"""The end of a fit as one pure function."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.sharding import on_mesh
from numpyro_jala.engine import mixture, sampler
from numpyro_jala.engine.state import REST, State
from numpyro_jala.inference import estimation, modes, programs, snapshots
from numpyro_jala.inference.programs import APART, CLOUDS, SETTLE, Data, Fixed
from numpyro_jala.inference.rest import FORGOTTEN, ROUNDS, forget
from numpyro_jala.inference.snapshots import Snapshot


class _Settling(NamedTuple):
    """Particles on the way to rest."""

    state: State
    num_rounds: Array  # ()
    left: Array  # (dim,), of their first deviations


def _is_unsettled(carry: _Settling) -> Array:
    return (carry.left.max() > FORGOTTEN) & (carry.num_rounds < len(ROUNDS))


@on_mesh
def settle(fixed: Fixed, data: Data, state: State) -> tuple[Array, Array, Array, State]:
    """Rest at the estimate and find the evidence and its error there, in one go."""
    problem, stage = programs.problem_of(fixed, data), jnp.asarray(REST)
    params = programs.best_params(fixed, state)
    rng_key, bridge_key = random.split(random.fold_in(state.rng_key, 1))

    def rest(current: State, num_steps: int | Array, wait: int) -> State:
        def body(count: int, here: State) -> State:
            left = jnp.asarray(wait) - count
            return sampler.step(problem, fixed.settings, here, stage, params, left)[0]

        return lax.fori_loop(0, num_steps, body, current)

    def settle_more(carry: _Settling) -> _Settling:
        current, index, left = carry
        after = rest(current, jnp.asarray(ROUNDS)[index], 0)
        return _Settling(after, index + 1, forget(left, current.cloud, after.cloud))

    def keep(current: State, _: None) -> tuple[State, Snapshot]:
        current = rest(current, APART, 0)
        return current, snapshots.take(current.cloud, fixed.layout.partition)

    state = rest(state._replace(rng_key=rng_key), SETTLE, SETTLE if params.size else 0)
    first = _Settling(state, jnp.zeros((), int), jnp.ones(fixed.layout.dim))
    state = lax.while_loop(_is_unsettled, settle_more, first).state
    state, kept = lax.scan(keep, state, length=CLOUDS)
    clouds = [jax.tree.map(lambda leaf, i=i: leaf[i], kept) for i in range(CLOUDS)]
    return params, *_evidence(fixed, data, params, bridge_key, clouds), state


def _evidence(
    fixed: Fixed, data: Data, params: Array, rng_key: PRNGKey, clouds: list[Snapshot]
) -> tuple[Array, Array]:
    """Return the log-evidence and its standard error. The latents are one component."""
    bridge_key, draw_key = random.split(rng_key)
    gaussian, level = estimation.fit_loo(fixed, clouds)
    bridge = estimation.bridge_to(fixed, bridge_key, data, params, clouds, gaussian, level)
    log_evidence, error = jnp.asarray(bridge.log_evidence), bridge.standard_error
    if mixture.serves(fixed.layout.partition):
        drawn = modes.estimate(modes.weigh(fixed, draw_key, data, params, clouds, level))
        takes_draws = modes.choose(bridge, drawn).takes_draws
        log_evidence = jnp.where(takes_draws, drawn.log_evidence, log_evidence)
        error = jnp.where(takes_draws, drawn.standard_error, error)
    return log_evidence - level[0], jnp.asarray(error)
