"""Clouds of particles at rest at some parameters, and what they know of these.

A run, its state and parameters come in. Out go the state there, clouds a few moves apart
with Gaussians fitted to them, and the information by Louis's identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
from jax import random

from numpyro_jala._typing import Array
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import em
from numpyro_jala.engine.state import REST, State
from numpyro_jala.inference import estimation, information, programs, snapshots
from numpyro_jala.inference.estimation import Weighted
from numpyro_jala.inference.evidence import Gaussian
from numpyro_jala.inference.information import Information, Moments
from numpyro_jala.inference.loop import run_steps
from numpyro_jala.inference.programs import CLOUDS, SETTLE
from numpyro_jala.inference.record import Run
from numpyro_jala.inference.snapshots import Snapshot


class AtRest(NamedTuple):
    """Particles at rest.

    clouds
        Some of them, a few moves apart.
    gaussian, level
        Fitted to the clouds, see :func:`~numpyro_jala.inference.estimation.fit_loo`.
    """

    state: State
    params: Array  # (num_params,)
    clouds: list[Snapshot]
    gaussian: Gaussian
    level: Array  # (components,)


def go(run: Run, state: State, params: Array) -> State:
    """Bring the particles to some parameters, a bit at each step."""
    num_steps = _num_steps_to(run, state, params)
    return run_steps(run, state, REST, num_steps, params, num_steps if params.size else 0)


def _num_steps_to(run: Run, state: State, params: Array) -> int:
    """Return how many steps lead to some parameters, every other one a move there.

    No more than what small components can follow: they settle where clouds are kept. None
    without params: one component is given the time to settle anyway, see
    :mod:`~numpyro_jala.inference.rest`, if it did not begin as draws from a Gaussian that is
    nearly the posterior.
    """
    partition, newton = run.fixed.layout.partition, run.fixed.settings.newton
    if not params.size and (partition.is_joint or run.data.mode is not None):
        return 0
    if not (partition.has_small_components and newton and int(state.num_steps)):
        return SETTLE
    change, num_components = params - state.target.params, partition.num_components
    needed = em.num_steps_to(fetch(state.optim_state), fetch(change), num_components)
    known = np.nan_to_num(np.ceil(needed), nan=np.inf)  # or else the most
    return 2 * int(np.clip(known, 1, SETTLE // 2))


def stay(run: Run, state: State, params: Array) -> State:
    """Move the particles at the parameters until they have forgotten where they were."""
    return run_steps(run, state, REST, programs.num_apart(run.fixed), params)


def snapshot(run: Run, state: State) -> Snapshot:
    """Keep what is needed of the particles as they are."""
    return snapshots.take(state.cloud, run.fixed.layout.partition)


def collect(
    run: Run, state: State, params: Array, num_clouds: int
) -> tuple[State, list[Snapshot]]:
    """Keep some clouds at the parameters where the particles are."""
    clouds = []
    for _ in range(num_clouds):
        state = stay(run, state, params)
        clouds.append(snapshot(run, state))
    return state, clouds


def keep(run: Run, state: State, params: Array) -> AtRest:
    """Keep clouds, and what is fitted to them."""
    state, clouds = collect(run, state, params, CLOUDS)
    return _fit(run, state, params, clouds)


def keep_more(run: Run, here: AtRest, num_clouds: int) -> AtRest:
    """Keep so many clouds in addition, and what is fitted to all."""
    state, clouds = collect(run, here.state, here.params, num_clouds)
    return _fit(run, state, here.params, here.clouds + clouds)


def _fit(run: Run, state: State, params: Array, clouds: list[Snapshot]) -> AtRest:
    fitted = run.programs.ready(estimation.fit_loo)(run.fixed, clouds)
    return AtRest(state, params, clouds, *fitted)


def redrawn(run: Run, state: State, drawn: Weighted) -> State:
    """Replace the particles by draws, which do not descend from each other."""
    key = random.fold_in(state.rng_key, 5)
    redraw = run.programs.ready(estimation.redraw)
    cloud = redraw(run.fixed, key, drawn, state.cloud)
    return state._replace(cloud=cloud)


def average(run: Run, params: Array, cloud: Snapshot, follows: bool) -> Moments:
    """Average over a cloud what the information needs."""
    num_particles = cloud.position.shape[0] * cloud.position.shape[1]
    run.num_evaluations += num_particles * (1 + 2 * params.size)
    louis = run.programs.ready(estimation.louis)
    moments: Moments = louis(run.fixed, run.placed, params, cloud, np.asarray(follows))
    return moments


def inform(
    run: Run, params: Array, clouds: Iterable[Snapshot], precise: float = 0.0
) -> Information:
    """Find what the data say about the parameters, by Louis's identity.

    Parameters
    ----------
    clouds
        No more of them are asked for than it takes.
    precise
        Monte Carlo error of standard errors, as a share of them, that is small enough.
    """
    of, source = partial(average, run, params), iter(clouds)
    first = next(source)
    if run.fixed.settings.num_islands == 1:  # nothing tells noise from curvature
        return information.combine([of(first, False)])
    # A linear flow serves where the posterior is nearly Gaussian, else it may add noise.
    both = [of(first, follows) for follows in (True, False)]
    found = [information.combine([each]) for each in both]
    follows = information.is_quieter(*found)
    moments, known = ([both[0]], found[0]) if follows else ([both[1]], found[1])
    while not _worst_error(run, known) < precise and (cloud := next(source, None)):
        moments.append(of(cloud, follows))
        known = information.combine(moments)
    return known._replace(motion=both[0].motion)


def _worst_error(run: Run, known: Information) -> float:
    """Return the largest error of a standard error, infinite where one is not known."""
    return float(np.nan_to_num(run.uncertainty(known).error, nan=np.inf).max())
