"""What a run ends with: the estimate, the log-evidence and the information there."""

from __future__ import annotations

from jax import random

from numpyro_jala._typing import Array
from numpyro_jala.engine.state import State
from numpyro_jala.inference import clouds, evidence, programs, rest, rounding
from numpyro_jala.inference.death import DeathError
from numpyro_jala.inference.one_component import conclude_one
from numpyro_jala.inference.record import Ending, Run
from numpyro_jala.inference.several_components import conclude_several


def conclude(run: Run, state: State) -> None:
    """Rest at the estimate, and find the log-evidence and the information there.

    Where the particles die of it, the result is the state as it was, without them.
    """
    params = programs.best_params(run.fixed, state)
    recursive = programs.log_evidence(state)
    try:
        end = _conclude_alive(run, state, params)
    except DeathError as error:
        run.last_state, run.death = state, str(error)
        end = Ending(state, params, evidence.unknown(run.fixed.settings.num_islands))
    run.store_result(end, recursive)


def _conclude_alive(run: Run, state: State, params: Array) -> Ending:
    if run.fixed.settings.num_islands == 1:
        cloud = clouds.snapshot(run, state)
        found = clouds.inform(run, params, [cloud]) if run.informs else None
        return Ending(state, params, evidence.unknown(1), found)
    rng_key, draw_key = random.split(random.fold_in(state.rng_key, 1))
    state = state._replace(rng_key=rng_key)
    state = rest.settle(run, state, params)
    is_joint = run.fixed.layout.partition.is_joint
    end = conclude_one if is_joint else conclude_several
    return rounding.correct(run, end(run, state, params, draw_key))
