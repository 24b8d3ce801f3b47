"""How well each group is predicted by the others, without fitting the model again."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from numpyro_jala.engine import em
from numpyro_jala.inference.record import Run


class LeaveOneGroupOut(NamedTuple):
    """How well groups are predicted that the params have not seen.

    elpd
        Expected log predictive density, the sum over groups.
    se
        Its standard error, from how the groups differ.
    num_effective
        Effective number of params: how much larger the log-evidence is.
    groups
        A row for each group, named by its first latent: its ``elpd``, its ``log_evidence``
        at the estimate, and the difference, its ``influence``. Two models of the same
        groups are compared group by group: the difference of their ``elpd`` has the standard
        error ``sqrt(n)`` times the standard deviation of the groups' differences.
    """

    elpd: float
    se: float
    num_effective: float
    groups: pd.DataFrame


def leave_one_group_out(run: Run) -> LeaveOneGroupOut:
    """Return what a run with several components says of each of them."""
    layout, found = run.fixed.layout, run.result.by_component
    if found is None and not layout.partition.is_joint:
        raise ValueError(
            "The run found no log-evidence of its groups: with a single island there is "
            "none, nor where the particles died at the estimate."
        )
    if found is None:
        raise ValueError(
            f"The latents are one component, of {layout.dim}, and there is no other group "
            "to predict it from. Make what all groups share a numpyro.param, and leave "
            "components at 'auto'."
        )
    influence = found.influence
    if influence is None:
        if layout.init_params.size:
            raise ValueError(
                f"The model has {layout.init_params.size} params. What a group has done to "
                f"them is only known of at most {em.FEW_PARAMS}."
            )
        influence = np.zeros_like(found.log_evidence)
    elpd = found.log_evidence - influence
    _, first = np.unique(layout.partition.owner, return_index=True)
    groups = pd.DataFrame(
        {"elpd": elpd, "log_evidence": found.log_evidence, "influence": influence},
        index=pd.Index(layout.labels(first), name="group"),
    )
    error = float(np.sqrt(elpd.size) * elpd.std(ddof=1))
    return LeaveOneGroupOut(float(elpd.sum()), error, float(influence.sum()), groups)
