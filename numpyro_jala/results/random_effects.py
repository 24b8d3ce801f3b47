"""Tables of group effects, as lme4's ``ranef`` and ``coef`` give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from numpyro_jala.results.groups import find_group, group_names

#: Probability of the intervals that a result stores where it does not keep all draws.
_STORED = 0.9


def random_effects(
    idata: Any,
    site: str,
    names: Sequence[Any] | None = None,
    *,
    entry: int | None = None,
    centre: float = 0.0,
    prob: float = 0.9,
) -> pd.DataFrame:
    """Return the effect of each group, with its standard error and interval.

    Like lme4's ``ranef`` with ``condVar``, these are conditional on the estimated params:
    the uncertainty of the params is not in them.

    Parameters
    ----------
    idata
        What ``JALAEM.run`` returned.
    site
        Name of a latent site in a plate.
    names
        Of the groups; by default their numbers.
    entry
        Which effect of a group, if the site has several for each, as an intercept and a
        slope.
    centre
        What to subtract, for effects that the model does not centre at zero: the mean that
        it gives them, such as ``jala.params["mean"]``.
    prob
        Of the intervals.

    Returns
    -------
    A row for each group, the largest effect first, with the columns ``mean``, ``se``,
    ``low`` and ``high``. :func:`best_and_worst` shortens it.

    Examples
    --------
    One chain of two draws, of the effects of two groups:

    >>> draws = ("chain", "draw", "group"), np.array([[[0.0, 3.0], [1.0, 5.0]]])
    >>> idata = xr.DataTree.from_dict({"/posterior": xr.Dataset({"u": draws})})
    >>> table = random_effects(idata, "u", ["a", "b"], centre=1.0, prob=0.5)
    >>> print(table.to_string(index_names=False))
       mean   se   low  high
    b   3.0  1.0  2.50  3.50
    a  -0.5  0.5 -0.75 -0.25
    """
    described = _describe(idata, site, prob)
    chosen = _choose_entry(described, site, entry)
    (dim,) = chosen.dims[1:]
    mean, error, low, high = chosen.values.astype(float)
    size = mean.size
    if names is not None and len(names) != size:
        raise ValueError(
            f"There are {len(names)} names, but site {site!r} has {size} groups."
        )
    index = pd.Index(np.arange(size) if names is None else list(names), name=dim)
    columns = {
        "mean": mean - centre,
        "se": error,
        "low": low - centre,
        "high": high - centre,
    }
    table = pd.DataFrame(columns, index)
    return table.sort_values("mean", ascending=False, kind="stable")


def best_and_worst(table: pd.DataFrame, count: int = 5) -> pd.DataFrame:
    """Return the groups with the largest and the smallest effects.

    Parameters
    ----------
    table
        From :func:`random_effects`.
    count
        How many of each; all groups, if there are no more than twice as many.
    """
    ordered = table.sort_values("mean", ascending=False, kind="stable")
    if len(ordered) <= 2 * count:
        return ordered
    return pd.concat([ordered.iloc[:count], ordered.iloc[len(ordered) - count :]])


def _describe(idata: Any, site: str, prob: float) -> xr.DataArray:
    """Return mean, standard deviation and interval of a site, in the first dimension."""
    if not 0 < prob < 1:
        raise ValueError(f"prob={prob} is not between 0 and 1.")
    tail = (1 - prob) / 2
    draws = find_group(idata, "posterior")
    if site not in draws:
        known = ", ".join(str(name) for name in draws.data_vars)
        raise ValueError(f"There is no latent site {site!r}; there are {known}.")
    # Where not all draws are kept, all of them are described.
    if "latent_summary" in group_names(idata) and prob == _STORED:
        stored = find_group(idata, "latent_summary")[site]
        return stored.isel(statistic=[0, 1, 2, 4])
    values, over = draws[site], ("chain", "draw")
    quantiles = values.quantile([tail, 1 - tail], over).drop_vars("quantile")
    moments = xr.concat([values.mean(over), values.std(over)], "statistic")
    return xr.concat([moments, quantiles.rename(quantile="statistic")], "statistic")


def _choose_entry(described: xr.DataArray, site: str, entry: int | None) -> xr.DataArray:
    """Return the described site with the groups as its only other dimension."""
    num_dims = described.ndim - 1
    if num_dims == 2 and entry is not None:
        return described[:, :, entry]
    if num_dims == 1 and entry is None:
        return described
    shape = described.shape[1:]
    raise ValueError(
        f"Site {site!r} has shape {shape} and entry={entry}. A table takes one effect for "
        "each group: entry chooses one from the last of two dimensions, and is not given "
        "where there is one dimension."
    )
