"""The maximum of the log-likelihood, and its information, by scores on common draws.

A function comes in that gives the score at any parameters, always on the same draws or
particles: that makes it one smooth function. Out go parameters, or the information.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.backend.precision import total
from numpyro_jala.inference.estimation import Score
from numpyro_jala.inference.information import Information

#: Most times that the maximum is sought with new draws.
ROUNDS = 6
_NEWTON_STEPS, _HALVINGS = 8, 6
#: Steps where Python does not look on.
_FEW_STEPS = 2
#: Share of their effective size that draws may keep where they serve other params.
_COVERS = 0.3
#: Roundings of a component's potential: one of a sum over its rows is not the only one.
_ROUNDING = 8
#: Share that they keep where they serve as well as new ones would.
_COVERS_AS_NEW = 0.9
#: Nats to the maximum that are as good as none: a fiftieth of a standard error.
_ENOUGH = 2e-4
#: Length of a difference, in standard errors of the estimate: the likelihood of a weakly
#: determined parameter is a quadratic over a short way only.
_DIFFERENCE = 0.1


class Maximum(NamedTuple):
    """Where a maximum is.

    params
        The same object as the start if there was nothing to gain.
    score
        Of each island.
    as_new
        Whether the draws serve there as well as new ones would.
    """

    params: Array  # (num_params,)
    score: np.ndarray  # (num_islands, num_params)
    as_new: bool


def maximise(
    score_at: Callable[[Array], Score], params: Array, covariance: np.ndarray, again: bool
) -> Maximum:
    """Climb to the maximum by Newton's method.

    Parameters
    ----------
    covariance
        Of the estimate, about.
    again
        Whether this was done before on other draws: a gain within their noise is left.
    """
    here = first = score_at(params)
    noise = _covariance_of_mean(by_island(here))
    enough = max(_ENOUGH, 0.5 * np.trace(covariance @ noise)) if again else _ENOUGH
    for _ in range(_NEWTON_STEPS):
        slope = by_island(here).mean(0)
        step = -covariance @ slope
        if -0.5 * slope @ step < enough:
            break
        # Where the likelihood is far from a quadratic, or draws do not reach.
        for _ in range(_HALVINGS):
            there = params + jnp.asarray(step, params.dtype)
            new = score_at(there)
            if _is_better(here, new):
                break
            step = step / 2
        else:
            break
        params, here = there, new
    as_new = bool(here.ess >= _COVERS_AS_NEW * first.ess)
    return Maximum(params, by_island(here), as_new)


def few_steps(
    score_at: Callable[[Array], Score], params: Array, covariance: Array
) -> Array:
    """Take a few steps of Newton's method, whatever they find: they can be traced."""
    here = score_at(params)
    for _ in range(_FEW_STEPS):
        there = params - covariance @ here.score.mean(0)
        new = score_at(there)
        better = _is_better(here, new)
        pairs = (there, new), (params, here)
        params, here = jax.tree.map(partial(jnp.where, better), *pairs)
    return params


def _is_better(here: Score, there: Score) -> Any:
    """Tell whether the draws serve there too, and the likelihood is no lower."""
    return (there.ess >= _COVERS * here.ess) & _rises(here, there)


def _rises(here: Score, there: Score) -> Any:
    """Tell whether the log-likelihood rises, or changes by no more than rounding.

    Component by component: the sum over a million has no digit left for it.
    """
    rise = total(there.log_evidence, -here.log_evidence)
    return rise >= -_ROUNDING * here.rounding


def differences(
    score_at: Callable[[Array], Score], params: Array, covariance: np.ndarray
) -> Information:
    """Find the information by differences of the score, and leave the score out.

    Parameters
    ----------
    covariance
        Of the estimate, about: along its axes rounding is not amplified.
    """
    root = np.linalg.cholesky(covariance)
    columns = []
    for direction in root.T:
        ahead, behind = (
            score_at(params + jnp.asarray(length * direction, params.dtype))
            for length in (_DIFFERENCE, -_DIFFERENCE)
        )
        change = np.subtract(ahead.score, behind.score, dtype=np.float64)
        columns.append(change @ root / (2 * _DIFFERENCE))
    white = np.stack(columns, -1)
    inverse = np.linalg.inv(root)
    observed = inverse.T @ (white + np.swapaxes(white, 1, 2)) @ inverse / 2
    nan = np.full_like(root, np.nan)
    return Information(nan[0], nan, observed)


def with_score(found: Information, score: np.ndarray) -> Information:
    """Put the score of each island (rows) in the place of what an information has."""
    noise = _covariance_of_mean(score)
    return found._replace(score=score.mean(0), score_noise=noise)


def by_island(found: Score) -> np.ndarray:
    """Return the score of each island, in double precision."""
    return np.asarray(found.score, np.float64)


def _covariance_of_mean(score: np.ndarray) -> np.ndarray:
    """Return the noise of the mean over islands (rows)."""
    num_islands, num_params = score.shape
    with np.errstate(invalid="ignore"):  # of scores that are not finite it is NaN
        return np.cov(score.T).reshape(num_params, num_params) / num_islands
