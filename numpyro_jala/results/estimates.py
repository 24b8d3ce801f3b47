"""The estimate on the parameters' own scale, with standard errors and intervals."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.inference.information import Uncertainty
from numpyro_jala.model.density import Layout
from numpyro_jala.model.supports import entry_range


class Estimate(NamedTuple):
    """One parameter array; errors and ends are NaN where the data say nothing."""

    value: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray


def param_leaves(values: dict[str, Any]) -> dict[str, np.ndarray]:
    """Name each leaf of the param sites; a plain array keeps the site's name."""
    return {
        name + jax.tree_util.keystr(where): np.asarray(leaf)
        for name, value in values.items()
        for where, leaf in jax.tree_util.tree_leaves_with_path(value)
    }


def label_entries(name: str, value: np.ndarray) -> Iterator[tuple[str, Any]]:
    """Yield a label and an index for each entry of an array."""
    if np.ndim(value) == 0:
        yield name, ()
        return
    for index in np.ndindex(value.shape):
        yield f"{name}[{','.join(map(str, index))}]", index


@compilation.program(static_argnums=0)
def _flat(layout: Layout, params: Array) -> Array:
    leaves = jax.tree.leaves(layout.constrain_params(params))
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])


@compilation.program(static_argnums=0)
def _slopes(layout: Layout, params: Array) -> Array:
    return jax.jacfwd(lambda p: _flat(layout, p))(params)


class _Delta(NamedTuple):
    """The delta method: constrained entries as linear functions of the parameters."""

    depends: np.ndarray  # (entries, num_params)
    covariance: np.ndarray  # (entries, entries)


def _delta(layout: Layout, params: Array, uncertainty: Uncertainty) -> _Delta:
    jacobian = np.asarray(_slopes(layout, params), np.float64)
    # Slopes at the estimate may be too small for a float, as at the edge of a support.
    depends = np.asarray(_slopes(layout, jnp.zeros_like(params))) != 0
    known = uncertainty.determined
    inner = uncertainty.covariance[np.ix_(known, known)]
    covariance = jacobian[:, known] @ inner @ jacobian[:, known].T
    is_open = depends[:, ~known].any(1)
    covariance[is_open] = covariance[:, is_open] = np.nan
    return _Delta(depends, covariance)


def estimates(
    layout: Layout, params: Array, uncertainty: Uncertainty | None, prob: float
) -> dict[str, Estimate]:
    """Return the estimate of each parameter array.

    Intervals are Wald's on the unconstrained scale and mapped through the constraint, so
    that they lie within it. An entry that several unconstrained parameters move, such as
    one of a simplex, has no such scale of its own, and its interval is symmetric, cut off
    where the range of such an entry ends.
    """
    leaves = param_leaves(jax.device_get(layout.constrain_params(params)))
    if uncertainty is None:
        # Very many parameters: no matrix as large as their square.
        unknown = {name: np.full(leaf.shape, np.nan) for name, leaf in leaves.items()}
        return {n: Estimate(leaf, *(3 * [unknown[n]])) for n, leaf in leaves.items()}
    depends, covariance = _delta(layout, params, uncertainty)
    value = np.concatenate([leaf.reshape(-1) for leaf in leaves.values()]).astype(float)
    error = np.sqrt(np.diag(covariance))
    quantile = NormalDist().inv_cdf((1 + prob) / 2)
    low, high = value - quantile * error, value + quantile * error
    reach = quantile * np.sqrt(np.nan_to_num(np.diag(uncertainty.covariance)))
    ends = np.stack([np.asarray(_flat(layout, params + s * reach)) for s in (-1, 1)])
    ends = np.concatenate([ends, value[None]])
    alone = (depends.sum(1) == 1) & np.isfinite(error)
    low = np.where(alone, ends.min(0), low)
    high = np.where(alone, ends.max(0), high)
    bounds = _bounds(layout, params)
    low, high = np.clip(low, *bounds), np.clip(high, *bounds)
    result, start = {}, 0
    for name, leaf in leaves.items():
        part = slice(start, start + leaf.size)
        start += leaf.size
        columns = (column[part].reshape(leaf.shape) for column in (error, low, high))
        result[name] = Estimate(leaf, *columns)
    return result


def _bounds(layout: Layout, params: Array) -> np.ndarray:
    """Return the range of each constrained entry, (2, entries)."""
    values = layout.constrain_params(params)
    ranges = [
        np.tile(entry_range(layout.constraints[name]), (np.size(leaf), 1))
        for name, value in values.items()
        for leaf in jax.tree.leaves(value)
    ]
    return np.concatenate(ranges).T


def covariance(layout: Layout, params: Array, uncertainty: Uncertainty) -> np.ndarray:
    """Return the covariance of all entries of the estimates, by the delta method."""
    return _delta(layout, params, uncertainty).covariance
