"""Read a table that comes with the package."""

from __future__ import annotations

import csv
from importlib import resources

import numpy as np

Table = dict[str, np.ndarray]


def read_table(name: str) -> Table:
    """Return the columns of a data set, under the names that they have in R.

    Parameters
    ----------
    name
        Of a data set: what follows ``load_`` in the names of the loaders.

    Returns
    -------
    Columns of numbers as floats, all others as strings.

    Examples
    --------
    >>> sorted(read_table("dyestuff"))
    ['Batch', 'Yield']
    """
    folder = resources.files("numpyro_jala.datasets")
    path = folder / f"{name}.csv"
    if not path.is_file():
        known = sorted(
            each.name.removesuffix(".csv")
            for each in folder.iterdir()
            if each.name.endswith(".csv")
        )
        raise ValueError(f"There is no data set {name!r}; there are {', '.join(known)}.")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {key: _parse([row[key] for row in rows]) for key in rows[0]}


def _parse(column: list[str]) -> np.ndarray:
    """Turn words into numbers, where all of them are."""
    try:
        return np.array([float(word) for word in column])
    except ValueError:
        return np.array(column)


def number_levels(column: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Give the levels of a factor numbers from zero, in the order in which they appear.

    Returns
    -------
    The number of each entry's level, and the levels.
    """
    levels, first, index = np.unique(column, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return np.argsort(order)[index], levels[order]
