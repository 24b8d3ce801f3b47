"""Whether the params have arrived at the maximum."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference.record import Result, Run
from numpyro_jala.results.log_evidence import is_bridged

#: Nats that the log-evidence may rise by within the last quarter of the steps.
_RISE = 0.5
#: Errors of the difference beyond which a rise is not chance.
_NUM_ERRORS = 3.0


class Rise(NamedTuple):
    """How far the log-evidence rose over the last steps, by two estimates afresh."""

    num_steps: int
    nats: float
    error: float

    @property
    def is_large(self) -> bool:
        """Whether it is more than chance, and worth more steps."""
        return self.nats > _RISE + _NUM_ERRORS * self.error


def last_rise(run: Run) -> Rise | None:
    """Return how the log-evidence rose, where no information tells what is missing.

    That is with very many params. None also where one of the estimates failed.
    """
    earlier = run.earlier
    is_known = run.result.uncertainty is not None
    if earlier is None or is_known or not is_bridged(run.result):
        return None
    bridge = run.result.bridge
    nats = float(bridge.log_evidence) - earlier.log_evidence
    error = float(np.hypot(bridge.standard_error, earlier.standard_error))
    if not np.isfinite([nats, error]).all():
        return None
    return Rise(run.count(EM_STEP) - earlier.num_steps, nats, error)


def shortfall(result: Result) -> float:
    """Return the nats to the maximum: none without parameters, unknown with many."""
    if result.uncertainty is not None:
        return result.uncertainty.shortfall
    return float("nan") if result.params.size else 0.0
