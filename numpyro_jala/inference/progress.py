"""The log-evidence before the last steps of a run, to see whether it still rises.

With very many params there is no information matrix to tell what is missing. The
log-evidence along the path is biased by params that ascend on the particles, so that both
ends of the last steps are estimated afresh.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from numpyro_jala.engine import em
from numpyro_jala.engine.state import EM_STEP, State
from numpyro_jala.inference.conclusion import conclude
from numpyro_jala.inference.record import Run

#: Part of the steps that come first.
_FIRST_PART = 0.75
#: Fewest steps of which a part says anything.
_FEWEST_STEPS = 4


class Earlier(NamedTuple):
    """The log-evidence after so many steps."""

    num_steps: int
    log_evidence: float
    standard_error: float


class WatchedRun(Run):
    """A run that remembers its log-evidence before the last steps."""

    earlier: Earlier | None = None


def num_first_steps(run: Run, num_steps: int) -> int:
    """Return after how many steps to look, or zero for not at all."""
    settings, num_params = run.fixed.settings, run.fixed.layout.init_params.size
    if num_params <= em.FEW_PARAMS or settings.num_islands == 1:
        return 0
    first = int(_FIRST_PART * num_steps) if num_steps >= _FEWEST_STEPS else 0
    return first if first > run.count(EM_STEP) else 0


def note_evidence(run: WatchedRun, state: State) -> None:
    """Estimate the log-evidence as at the end of a run, and leave the run as it is."""
    probe = copy.copy(run)
    probe._infos = {stage: list(parts) for stage, parts in run._infos.items()}
    conclude(probe, state)
    run.num_evaluations = probe.num_evaluations
    bridge = probe.result.bridge
    found = np.asarray(bridge.log_evidence), np.asarray(bridge.standard_error)
    run.earlier = Earlier(run.count(EM_STEP), *map(float, found))
