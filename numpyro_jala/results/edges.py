"""What is lost at the edges of supports, where a precision has no more numbers."""

from __future__ import annotations

import numpy as np

from numpyro_jala.inference.record import Run

#: Nats below the smallest number that are worth a warning, in errors of the log-evidence.
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
    rounded = [
        f"Of the particles of {name!r} {share:.0%} are nearer to the edge of its support than "
        "the precision can tell. The model's density there is not what it should be, and "
        "neither params nor log-evidence are to be trusted. Turn on double precision "
        "(jax_enable_x64), or use another parametrisation."
        for name, share in run.rounded.items()
    ]
    beyond = [
        f"The posterior of {name!r} reaches below the smallest number that the precision "
        f"has: about {lost:.2g} nats of the log-evidence are lost there, and the params go "
        "by what is left. Turn on double precision (jax_enable_x64), or use another "
        "parametrisation."
        for name, lost in run.beyond.items()
        if lost > _LOST * error
    ]
    return tied + rounded + beyond
