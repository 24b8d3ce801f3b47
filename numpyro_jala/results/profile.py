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

#: Length of the first step to either side, in standard errors, and how steps grow: more
#: while the root of the drop is below the last number, as from an estimate at an edge.
_FIRST, _GROWTH, _HURRY, _FLAT = 0.7, 1.2, 2.0, 0.3
#: Most steps to one side, and standard errors that they go. What has not fallen by then
#: is taken not to fall before the edge of its support.
_MOST_STEPS, _REACH = 12, 25.0
#: Steps end at this share of the estimate's distance from an edge: nearer there is nothing
#: to see but rounding.
_AT_EDGE = 0.01
#: Most that the root may change between the two values around an end of the interval.
_GAP = 1.2
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

    def is_at_edge(self, place: float, sign: int) -> bool:
        """Tell whether a place is as good as the edge of the support on its side."""
        edge, value, first = map(self.value, (sign * np.inf, place, self.centre))
        return np.isfinite(edge) and abs(value - edge) < _AT_EDGE * abs(first - edge)

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
    sides = [_one_side(fit, scale, best, sign, far) for sign in (-1, 1)]
    centre = _Row(scale.centre, best.log_evidence, best.standard_error, 0.0)
    rows = _from_the_top(pd.DataFrame(sorted([*sides[0], centre, *sides[1]])))
    low, high = (scale.value(_cross(rows, sign * far)) for sign in (-1, 1))
    rows.insert(0, "value", [scale.value(place) for place in rows.pop("place")])
    return Profile(name, prob, low, high, rows)


def _from_the_top(rows: pd.DataFrame) -> pd.DataFrame:
    """Measure drops from the highest value: an estimate near an edge may not be there yet."""
    top = rows.loc[rows["log_evidence"].idxmax()]
    drop = top["log_evidence"] - rows["log_evidence"]
    return rows.assign(zeta=np.sign(rows["place"] - top["place"]) * np.sqrt(2 * drop))


class _Row(NamedTuple):
    """A row of the table, still by its place on the unconstrained scale."""

    place: float
    log_evidence: float
    se: float
    zeta: float


def _one_side(fit: FitFn, scale: Scale, best: Point, sign: int, far: float) -> list[_Row]:
    """Step away from the estimate, then look closer at where the root is far enough."""
    last = best

    def at(place: float) -> _Row:
        nonlocal last
        last = fit(scale.value(place), last.params)
        drop = max(best.log_evidence - last.log_evidence, 0.0)
        return _Row(place, last.log_evidence, last.standard_error, sign * np.sqrt(2 * drop))

    rows, step = [_Row(scale.centre, 0.0, 0.0, 0.0)], sign * _FIRST * scale.unit
    reach = _REACH * scale.unit
    while len(rows) <= _MOST_STEPS and abs(rows[-1].place - scale.centre) < reach:
        rows.append(at(rows[-1].place + step))
        # The first also where it is NaN.
        if not abs(rows[-1].zeta) <= far or scale.is_at_edge(rows[-1].place, sign):
            break
        step *= _GROWTH if abs(rows[-1].zeta) > _FLAT else _HURRY
    inside, outside = rows[-2:]
    while abs(outside.zeta) > far and abs(outside.zeta - inside.zeta) > _GAP:
        middle = at((inside.place + outside.place) / 2)
        rows.append(middle)
        if len(rows) > 2 * _MOST_STEPS or not np.isfinite(middle.zeta):
            break
        if abs(middle.zeta) > far:
            outside = middle
        else:
            inside = middle
    return rows[1:]


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
