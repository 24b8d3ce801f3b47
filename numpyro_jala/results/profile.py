"""The profile likelihood of one param: the maximum over all others, at some of its values."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator

from numpyro_jala._typing import Array, Tree
from numpyro_jala.model.supports import from_support, to_support

#: Length of the first step to either side, in standard errors, and how steps grow.
_FIRST, _GROWTH = 0.7, 1.2
#: Most steps to one side. They reach twelve standard errors: what has not fallen by then
#: is at an edge of its support.
_MOST_STEPS = 8
#: Stands in for a standard error on the unconstrained scale where there is none.
_UNKNOWN = 0.5


class Profile(NamedTuple):
    """The profile likelihood of a param, and the interval that it gives.

    values
        A row for each ``value`` of the param: the ``log_evidence`` with all other params at
        their best, its standard error ``se``, and ``zeta``, the signed root of twice the
        drop from the maximum. Where the likelihood is that of a Gaussian, ``zeta`` is a
        straight line.
    low, high
        Ends of the interval. An end is that of the support where the likelihood does not
        fall far enough on the way there, as for a variance that may be zero.
    """

    name: str
    prob: float
    low: float
    high: float
    values: pd.DataFrame


class Point(NamedTuple):
    """A fit with one param held at a value."""

    log_evidence: float
    standard_error: float
    params: dict[str, Tree]


#: Fits the other params from a start, with the param at a value.
FitFn = Callable[[float, dict[str, Tree]], Point]


class Scale:
    """The scale on which a param is unconstrained.

    Parameters
    ----------
    support
        Of the param.
    value, standard_error
        Of its estimate.
    """

    def __init__(self, support: Any, value: Tree, standard_error: Tree) -> None:
        self._support = {"": support}
        centre = from_support({"": jnp.asarray(value, float)}, self._support)[""]
        slope = abs(float(jax.grad(self._constrain)(centre)))
        unit = float(np.asarray(standard_error)) / slope
        self.centre = float(centre)
        self.unit = unit if np.isfinite(unit) and unit > 0 else _UNKNOWN

    def _constrain(self, place: Array) -> Array:
        constrained: Array = to_support({"": place}, self._support)[""]
        return constrained

    def value(self, place: float) -> float:
        """Return the param at a place on the unconstrained scale, which may be infinite."""
        return float(self._constrain(jnp.asarray(place, float)))


def check_name(params: dict[str, Tree], name: str) -> None:
    """Refuse what is not a param of a single number."""
    if name not in params:
        known = ", ".join(params) or "none"
        raise ValueError(f"There is no param {name!r}; there are {known}.")
    if np.shape(params[name]) != ():
        raise ValueError(
            f"Param {name!r} has shape {np.shape(params[name])}. A profile is of a single "
            "number: write the entry that it is about as a param of its own."
        )


def trace_profile(fit: FitFn, scale: Scale, name: str, best: Point, prob: float) -> Profile:
    """Step to both sides of the estimate until the likelihood has fallen far enough."""
    if not 0 < prob < 1:
        raise ValueError(f"prob={prob} is not between 0 and 1.")
    far = NormalDist().inv_cdf(0.5 + prob / 2)
    below, above = (_one_side(fit, scale, best, sign, far) for sign in (-1, 1))
    rows = pd.DataFrame(
        [*below[::-1], (scale.centre, best.log_evidence, best.standard_error, 0.0), *above],
        columns=["place", "log_evidence", "se", "zeta"],
    )
    low, high = (scale.value(_cross(rows, sign * far)) for sign in (-1, 1))
    rows.insert(0, "value", [scale.value(place) for place in rows.pop("place")])
    return Profile(name, prob, low, high, rows)


def _one_side(
    fit: FitFn, scale: Scale, best: Point, sign: int, far: float
) -> list[tuple[float, float, float, float]]:
    """Return place, log-evidence, its error and signed root along one side."""
    rows: list[tuple[float, float, float, float]] = []
    place, step, last = scale.centre, _FIRST * scale.unit, best
    for _ in range(_MOST_STEPS):
        place, step = place + sign * step, _GROWTH * step
        last = fit(scale.value(place), last.params)
        drop = max(best.log_evidence - last.log_evidence, 0.0)
        zeta = sign * np.sqrt(2 * drop)
        rows.append((place, last.log_evidence, last.standard_error, zeta))
        if not abs(zeta) <= far:  # also where it is NaN
            break
    return rows


def _cross(rows: pd.DataFrame, zeta: float) -> float:
    """Return where the signed root crosses a value; infinite where it does not."""
    known = rows[np.isfinite(rows["zeta"])]
    # Noise may turn the root back for a step: an inverse needs it to rise.
    root = np.maximum.accumulate(known["zeta"].to_numpy())
    rises = np.concatenate([[True], np.diff(root) > 0])
    root, place = root[rises], known["place"].to_numpy()[rises]
    if len(root) < 2 or not root[0] <= zeta <= root[-1]:
        return float(np.sign(zeta) * np.inf)
    return float(PchipInterpolator(root, place)(zeta))
