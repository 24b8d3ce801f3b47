"""The stages of a run, one after the other: anneal, ascend, finish."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.engine.state import ANNEAL, ANNEAL_FIXED, EM_STEP, State
from numpyro_jala.inference import ahead, death, programs
from numpyro_jala.inference.checkpoint import Checkpoint
from numpyro_jala.inference.death import DeathError
from numpyro_jala.inference.programs import CHUNK
from numpyro_jala.inference.record import Run
from numpyro_jala.model.supports import find_fallen

_MOST_STEPS = 5_000
#: Given the number of steps so far and the state, up to which number to go on: that
#: number itself where there are enough.
Until = Callable[[int, Any], int]
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
    ahead.begin(run, program, args)
    state: State = run.programs.ready(program)(*args)
    return state


def run_steps(
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
    component, alive = (int(each) for each in _fewest_alive(new.cloud.log_weight))
    # One island alone has no others to learn from.
    if alive < min(2, run.fixed.settings.num_islands):
        run.last_state = state
        raise DeathError(death.describe(run, state, component, int(count)))
    seen_as = ANNEAL if stage == ANNEAL_FIXED else stage
    run.keep(seen_as, jax.device_get(infos), int(count))
    return new


@compilation.program(static_argnums=())
def _fewest_alive(log_weight: Array) -> tuple[Array, Array]:
    """Return the component that lives in the fewest islands, and in how many."""
    alive = jnp.isfinite(log_weight).any(-1).sum(0)
    return alive.argmin(), alive.min()


def anneal(
    run: Run, state: State, holds: bool, show: bool, checkpoint: Checkpoint | None
) -> State:
    """Go from the reference to the posterior.

    Unless the parameters hold still, they move on the way where they are far off.
    """
    if bool(jnp.all(state.target.temperature >= 1)):
        return state
    first = state.target.params
    most = round(_MOST_STEPS * run.fixed.settings.annealing_effort)
    pace = _Pace(None if checkpoint is None else checkpoint.every)
    with tqdm(disable=not show, desc="anneal", unit=" steps") as bar:
        while run.count(ANNEAL) < most:
            state = run_steps(run, state, ANNEAL_FIXED if holds else ANNEAL, pace.count)
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
        f"{most} steps: {_why_so_far(run, first, state.target.params)}"
    )


def _why_so_far(run: Run, first: Array, last: Array) -> str:
    """Say what keeps the posterior out of reach, by the way that the params went."""
    layout = run.fixed.layout
    start, end = map(layout.constrain_params, (first, last))
    fallen = find_fallen(start, end, layout.constraints)
    if fallen is not None:
        name, value = fallen
        return (
            f"on the way {name} fell to {value:.3g}. Where a scale falls to zero the "
            "likelihood may grow without end, as of outcomes that are alike in every group. "
            f"Fix {name}, or look at the outcomes."
        )
    return (
        "the reference and the posterior at the first parameters are too far apart. Give "
        "init_params nearer to the data, or reference='laplace'."
    )


def ascend(
    run: Run,
    state: State,
    num_steps: int | None,
    show: bool,
    checkpoint: Checkpoint | None,
    until: Until | None,
) -> State:
    """Take EM steps, or as many as there are before the user interrupts."""
    if state.target.params.size == 0:
        num_steps, until = 0, None

    def em_steps(current: State, count: int) -> State:
        return run_steps(run, current, EM_STEP, count)

    state = take_steps(run, state, num_steps, show, em_steps, checkpoint, until)
    if checkpoint is not None:
        checkpoint.save(run, state)
    return state


def take_steps(
    run: Run,
    state: Any,
    num_steps: int | None,
    show: bool,
    steps_fn: Callable[[Any, int], Any],
    checkpoint: Checkpoint | None = None,
    until: Until | None = None,
) -> Any:
    """Call ``steps_fn(state, count)`` until there are enough steps, an interrupt or a death.

    Enough are ``num_steps``, unless ``until`` says something else on the way.
    """
    done = run.count(EM_STEP)
    until = until or (lambda *_: num_steps or 0)
    hidden = not show or num_steps == 0
    pace = _Pace(None if checkpoint is None else checkpoint.every)
    with tqdm(total=num_steps, initial=done, disable=hidden, desc="ascend") as bar:
        try:
            while done < (stop := until(done, state)):
                state = steps_fn(state, min(pace.count, stop - done))
                done += run.num_new
                pace.look(run.num_new)
                bar.update(run.num_new)
                bar.set_postfix(run.watch(EM_STEP))
                if checkpoint is not None:
                    checkpoint.note(run, state)
        except (KeyboardInterrupt, DeathError) as error:
            died = isinstance(error, DeathError)
            if died and done == 0:
                raise
            why = f"{error} Stopped" if died else "Interrupted"
            most = "" if num_steps is None else f" of {num_steps}"
            warnings.warn(
                f"{why} after {done}{most} steps; the result is what was reached by then.",
                stacklevel=4,
            )
    run.last_state = state
    return state
