"""What is lost at the edges of supports, where a precision has no more numbers."""

from __future__ import annotations

import numpy as np

from numpyro_jala.inference.record import Run

#: Nats at an edge that are worth a warning, in errors of the log-evidence.
_LOST = 0.5


def edge_warnings(run: Run) -> list[str]:
    """Return a sentence for each site that reaches to an edge."""
    error = float(np.nan_to_num(run.result.bridge.standard_error))
    tied = [
        f"Of the draws of {name!r} from its prior {share:.0%} are equal to others by "
        "rounding: they lie at the edge of its support, or are large beside their spread. "
        "What lies between is lost, and the log-evidence is not to be trusted. Turn on "
        "double precision (jax_enable_x64), subtract a constant, or use another prior."
        for name, share in run.tied_draws.items()
    ]
    lost = [
        f"The posterior of {name!r} reaches nearer to the edge of its support than the "
        f"precision can tell: about {nats:.2g} nats of the log-evidence are not what they "
        "should be, and the params go by them. Turn on double precision (jax_enable_x64), or "
        "use another parametrisation."
        for name, nats in run.lost.items()
        if nats > _LOST * error
    ]
    return tied + lost
