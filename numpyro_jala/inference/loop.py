"""The stages of a run, one after the other: anneal, ascend, finish."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from tqdm.auto import tqdm

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.engine import em
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.state import ANNEAL, ANNEAL_FIXED, EM_STEP, REST, State
from numpyro_jala.inference import evidence, information, programs
from numpyro_jala.inference.checkpoint import Checkpoint
from numpyro_jala.inference.information import Information, Moments
from numpyro_jala.inference.programs import APART, CHUNK, CLOUDS, SETTLE
from numpyro_jala.inference.record import Run

_MOST_STEPS = 5_000
#: Seconds between two looks at a run in progress.
_LOOK_EVERY = 1.0


class _Pace:
    """How many steps to take before Python looks on: fewer where they are slow."""

    def __init__(self, checkpoint_every: int | None) -> None:
        self.most = min(CHUNK, checkpoint_every or CHUNK)
        self.count = min(10, self.most)
        self._last_look = time.perf_counter()

    def look(self, num_steps: int) -> None:
        """Note that so many steps were taken since the last look."""
        now = time.perf_counter()
        wanted = num_steps * _LOOK_EVERY / max(now - self._last_look, 1e-6)
        self.count = int(min(max(wanted, 1), 2 * self.count, self.most))
        self._last_look = now


def begin(run: Run, program: Any, args: tuple[Any, ...]) -> State:
    """Make the first state by a program, while those that follow are compiled."""
    if run.fixed.settings.mesh is None and compilation.pays_ahead():
        _compile_ahead(run, program, args)
    state: State = run.programs.ready(program)(*args)
    return state


def _compile_ahead(run: Run, program: Any, args: tuple[Any, ...]) -> None:
    """Begin to compile what the run will call, in that order."""
    begin, at = run.programs.begin, (run.fixed, run.placed)
    state, number = begin(program, *args), np.asarray(0)
    params = state.target.params
    begin(programs.run_steps, *at, state, number, number, params, number)
    if _informs(params):
        begin(programs.louis, *at, params, state.cloud, np.asarray(True))
    if run.fixed.settings.num_islands > 1:
        clouds = [state.cloud] * CLOUDS
        begin(programs.estimate, run.fixed, state.rng_key, run.placed, params, clouds)


def _run_steps(
    run: Run,
    state: State,
    stage: int,
    num_steps: int,
    goal: Array | None = None,
    wait: int = 0,
) -> State:
    """Take a chunk of steps and keep what happened."""
    goal = state.target.params if goal is None else goal
    new, infos, count = run.programs.ready(programs.run_steps)(
        run.fixed,
        run.placed,
        state,
        np.asarray(stage),
        np.asarray(num_steps),
        goal,
        np.asarray(wait),
    )
    alive = int(jnp.isfinite(new.cloud.log_weight).any(-1).sum())
    # One island alone has no others to learn from.
    if alive < min(2, run.fixed.settings.num_islands):
        run.last_state = state
        raise RuntimeError(_describe_death(run, state, int(count)))
    seen_as = ANNEAL if stage == ANNEAL_FIXED else stage
    run.keep(seen_as, jax.device_get(infos), int(count))
    return new


def _describe_death(run: Run, state: State, num_steps: int) -> str:
    """Say that the particles came to places without a density, and what to do."""
    params = run.fixed.layout.constrain_params(state.target.params)
    step_size = run.fixed.settings.step_size
    advice = (
        f"step_size={step_size} may be too large: try a smaller one, or leave it out."
        if step_size is not None
        else "Start from other params, or check the model there."
    )
    return (
        "Nearly every particle came to a non-finite log-density, or lost all weight, "
        f"within the last {num_steps} steps, near parameters {params}. {advice} The last "
        "good state is kept in last_state."
    )


def anneal(
    run: Run, state: State, holds: bool, show: bool, checkpoint: Checkpoint | None
) -> State:
    """Go from the reference to the posterior.

    Unless the parameters hold still, they move on the way where they are far off.
    """
    if bool(jnp.all(state.target.temperature >= 1)):
        return state
    most = round(_MOST_STEPS * run.fixed.settings.annealing_effort)
    pace = _Pace(None if checkpoint is None else checkpoint.every)
    with tqdm(disable=not show, desc="anneal", unit=" steps") as bar:
        while run.count(ANNEAL) < most:
            state = _run_steps(run, state, ANNEAL_FIXED if holds else ANNEAL, pace.count)
            pace.look(run.num_new)
            bar.update(run.num_new)
            bar.set_postfix(run.watch(ANNEAL))
            if checkpoint is not None:
                checkpoint.note(run, state)
            if bool(jnp.all(state.target.temperature >= 1)):
                return state
    run.last_state = state
    raise RuntimeError(
        f"Annealing came to temperature {float(state.target.temperature.min()):.3g} in "
        f"{most} steps: the reference and the posterior at the first "
        "parameters are too far apart. Give init_params nearer to the data, or "
        "reference='laplace'."
    )


def ascend(
    run: Run, state: State, num_steps: int, show: bool, checkpoint: Checkpoint | None
) -> State:
    """Take EM steps, or as many as there are before the user interrupts."""
    if state.target.params.size == 0:
        num_steps = 0

    def run_steps(current: State, count: int) -> State:
        return _run_steps(run, current, EM_STEP, count)

    state = take_steps(run, state, num_steps, show, run_steps, checkpoint)
    if checkpoint is not None:
        checkpoint.save(run, state)
    return state


def take_steps(
    run: Run,
    state: Any,
    num_steps: int,
    show: bool,
    steps_fn: Callable[[Any, int], Any],
    checkpoint: Checkpoint | None = None,
) -> Any:
    """Call ``steps_fn(state, count)`` until there are enough steps or an interrupt."""
    done = run.count(EM_STEP)
    hidden = not show or not num_steps
    pace = _Pace(None if checkpoint is None else checkpoint.every)
    with tqdm(total=num_steps, initial=done, disable=hidden, desc="ascend") as bar:
        try:
            while done < num_steps:
                state = steps_fn(state, min(pace.count, num_steps - done))
                done += run.num_new
                pace.look(run.num_new)
                bar.update(run.num_new)
                bar.set_postfix(run.watch(EM_STEP))
                if checkpoint is not None:
                    checkpoint.note(run, state)
        except KeyboardInterrupt:
            warnings.warn(
                f"Interrupted after {done} of {num_steps} steps; the result is what "
                "was reached by then.",
                stacklevel=4,
            )
    run.last_state = state
    return state


def conclude(run: Run, state: State) -> None:
    """Rest at the estimate, and find the log-evidence and the information there."""
    params = programs.best_params(run.fixed, state)
    recursive = programs.log_evidence(state)
    if run.fixed.settings.num_islands == 1:
        known = _inform(run, params, [state.cloud])
        run.store_result(state, params, evidence.unknown(1), recursive, known)
        return
    rng_key, bridge_key = random.split(random.fold_in(state.rng_key, 1))
    state = state._replace(rng_key=rng_key)
    state = _run_steps(run, state, REST, SETTLE, params, SETTLE if params.size else 0)
    if run.fixed.settings.newton and int(state.num_steps) > 0:
        params, state = _polish(run, state, params)
    clouds = []
    for _ in range(CLOUDS):
        state = _run_steps(run, state, REST, APART, params)
        clouds.append(state.cloud)
    estimate = run.programs.ready(programs.estimate)
    found = estimate(run.fixed, bridge_key, run.placed, params, clouds)
    bridge = evidence.at_level(*found)
    run.num_evaluations += len(clouds) * state.cloud.log_weight.size
    known = _inform(run, params, clouds)
    run.store_result(state, params, bridge, recursive, known)


def _polish(run: Run, state: State, params: Array) -> tuple[Array, State]:
    """Take a Newton step on what the particles at rest know, and rest there."""
    known = _inform(run, params, [state.cloud])
    if known is None:
        return params, state
    uncertainty = information.invert(known, run.fixed.layout.is_free)
    step = jnp.asarray(information.newton_step(known, uncertainty), params.dtype)
    if not bool(em.is_near(state.optim_state, step, SETTLE // 2)):
        return params, state
    better = params + step
    return better, _run_steps(run, state, REST, SETTLE, better, SETTLE)


def _informs(params: Any) -> bool:
    """Tell whether there are params, and few enough to ask what the data say of them."""
    return 0 < params.size <= em.FEW_PARAMS


def _inform(run: Run, params: Array, clouds: list[Cloud]) -> Information | None:
    """Find what the data say about the parameters, if these are few."""
    if not _informs(params):
        return None

    def average(cloud: Cloud, follows: bool) -> Moments:
        run.num_evaluations += cloud.log_weight.size * (1 + 2 * params.size)
        louis = run.programs.ready(programs.louis)
        found = louis(run.fixed, run.placed, params, cloud, np.asarray(follows))
        return jax.device_get(found)

    if run.fixed.settings.num_islands == 1:  # nothing tells noise from curvature
        return information.combine([average(clouds[0], False)])
    # A linear flow serves where the posterior is nearly Gaussian, else it may add noise.
    following, plain = (average(clouds[0], follows) for follows in (True, False))
    follows = information.is_quieter(
        *(information.combine([m]) for m in (following, plain))
    )
    first = following if follows else plain
    rest = [average(cloud, follows) for cloud in clouds[1:]]
    return information.combine([first, *rest])
