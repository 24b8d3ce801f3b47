"""One component in the coordinates of a Laplace approximation: its maximum, its information.

There particles follow the parameters by themselves, so that the same particles tell the
score nearby. A run and its state come in; parameters or an information go out.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import em
from numpyro_jala.engine.state import State
from numpyro_jala.inference import clouds, estimation, newton
from numpyro_jala.inference.clouds import AtRest
from numpyro_jala.inference.estimation import Score
from numpyro_jala.inference.information import Information
from numpyro_jala.inference.record import Run
from numpyro_jala.inference.snapshots import Snapshot

#: Most times that differences are taken, each with lengths that the last one found.
_DIFFERENCES = 3


def rest(run: Run, state: State, params: Array) -> AtRest:
    """Climb to the maximum, if it is sought, and keep clouds there."""
    if run.maximises(state):
        params, state = climb(run, state, params)
    return clouds.keep(run, state, params)


def climb(run: Run, state: State, params: Array) -> tuple[Array, State]:
    """Climb to the maximum of the log-likelihood, and rest there."""
    for index in range(newton.ROUNDS):
        state = clouds.stay(run, state, params)
        if index == 0:
            cloud = clouds.snapshot(run, state)
            known = run.uncertainty(_find(run, state, params, cloud))
            covariance = np.nan_to_num(known.covariance)
        score_at = partial(_score, run, clouds.snapshot(run, state))
        better = newton.maximise(score_at, params, covariance, index > 0).params
        if better is params:
            break
        params, state = better, clouds.go(run, state, better)
    return params, state


def inform(run: Run, here: AtRest) -> Information:
    """Find score and information by differences."""
    return _find(run, here.state, here.params, here.clouds[0])


def _find(run: Run, state: State, params: Array, cloud: Snapshot) -> Information:
    """Find score and information by differences."""
    score_at = partial(_score, run, cloud)
    score = newton.by_island(score_at(params))
    root = np.asarray(em.root(state.optim_state.complete)[0], np.float64)
    covariance = root @ root.T
    for _ in range(_DIFFERENCES):
        last = covariance
        found = newton.differences(score_at, params, last)
        known = run.uncertainty(found)
        covariance = known.covariance
        if not known.determined.all() or _is_alike(covariance, last):
            break
    return newton.with_score(found, score)


def _is_alike(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether standard errors are alike, so that differences had the right lengths."""
    ratio = np.sqrt(np.diag(first) / np.diag(second))
    return bool(np.all(np.abs(np.log(ratio)) < 0.3))


def _score(run: Run, cloud: Snapshot, params: Array) -> Score:
    """Find the score of the marginal likelihood on particles."""
    num_particles = cloud.position.shape[0] * cloud.position.shape[1]
    run.num_evaluations += num_particles * (1 + params.size)
    program = run.programs.ready(estimation.score_of_particles)
    score: Score = fetch(program(run.fixed, run.placed, params, cloud))
    return score
