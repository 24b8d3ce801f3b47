"""Compile what a run will call while its first state is made.

A run and the program that makes its first state come in. Nothing goes out: the run's
programs are ready sooner.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numpyro_jala.backend import compilation
from numpyro_jala.engine import mixture
from numpyro_jala.inference import draws, estimation, modes, programs
from numpyro_jala.inference.programs import CLOUDS
from numpyro_jala.inference.record import Run
from numpyro_jala.inference.snapshots import take


def begin(run: Run, program: Any, args: tuple[Any, ...]) -> None:
    """Begin to compile what the run will call, in that order, if that saves time."""
    if run.fixed.settings.mesh is not None or not compilation.pays_ahead():
        return
    begin, at = run.programs.begin, (run.fixed, run.placed)
    state, number = begin(program, *args), np.asarray(0)
    params, cloud = state.target.params, take(state.cloud, run.fixed.layout.partition)
    begin(programs.run_steps, *at, state, number, number, params, number)
    if run.informs and run.data.mode is None:
        begin(estimation.louis, *at, params, cloud, np.asarray(True))
    elif run.informs:
        begin(estimation.score_of_particles, *at, params, cloud)
    if run.fixed.settings.num_islands > 1:
        fitted = begin(estimation.fit_loo, run.fixed, [cloud] * CLOUDS)
        end = _end_one if run.fixed.layout.partition.is_joint else _end_several
        end(run, state, [cloud] * CLOUDS, fitted)


def _end_one(run: Run, state: Any, clouds: list[Any], fitted: Any) -> None:
    """Begin what ends a run of one component."""
    drawn = run.fixed, state.rng_key, run.placed, state.target.params, clouds
    run.programs.begin(estimation.bridge_to, *drawn, *fitted)
    if mixture.serves(run.fixed.layout.partition):
        run.programs.begin(modes.weigh, *drawn, fitted[1])


def _end_several(run: Run, state: Any, clouds: list[Any], fitted: Any) -> None:
    """Begin what ends a run of several components."""
    params, settings = state.target.params, run.fixed.settings

    def begin(program: Any, num_draws: int, *others: Any) -> Any:
        defined = run.fixed, state.rng_key, num_draws, *fitted, params
        at = run.fixed, run.placed, params, draws.define_draws(*defined)
        return run.programs.begin(program, *at, *others)

    if run.informs:
        begin(estimation.score, draws.num_for_score(run.fixed))
    if not run.fixed.layout.partition.has_small_components:
        begin(estimation.sample, settings.num_draws, clouds)
        return
    begin(estimation.sample, settings.num_draws, [])
    if num_draws := draws.num_for_particles(run.fixed):
        drawn = begin(estimation.weigh, num_draws)
        again = run.fixed, state.rng_key, drawn, state.cloud
        run.programs.begin(estimation.redraw, *again)
