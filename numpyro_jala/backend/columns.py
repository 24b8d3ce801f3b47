"""What NumPy does with each column of millions, in parts on all cores.

A part of the columns stays in a processor's cache, and NumPy lets others work meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numpyro_jala.backend.blocks import num_cores

#: Columns of a part: some hundred rows of them fill a megabyte or two.
_COLUMNS = 2**12


def over_columns(
    function: Callable[[np.ndarray], np.ndarray], values: np.ndarray
) -> np.ndarray:
    """Apply a function of the columns (last axis) that treats each like the others.

    Its results are put together along their last axis.
    """
    num_parts = max(values.shape[-1] // _COLUMNS, 1)
    parts = np.array_split(values, num_parts, axis=-1)
    if num_parts == 1:
        return function(values)
    with ThreadPoolExecutor(num_cores()) as pool:
        return np.concatenate(list(pool.map(function, parts)), -1)
