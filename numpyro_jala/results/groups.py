"""Look a group up in a result, in memory or read back from a file."""

from __future__ import annotations

from typing import Any

import xarray as xr


def find_group(idata: Any, name: str) -> xr.Dataset:
    """Return a group of an ``InferenceData`` or of a ``DataTree``."""
    names = group_names(idata)
    if name not in names:
        raise ValueError(
            f"The result has no group {name!r}: it has {', '.join(names)}. A run without "
            "params or with num_steps=0 has no em_trace and no estimate, and one that "
            "started from given particles no anneal_trace."
        )
    group = idata[name]
    return group.to_dataset() if hasattr(group, "to_dataset") else group


def group_names(idata: Any) -> tuple[str, ...]:
    """Return the names of the groups, of either generation of ArviZ."""
    return tuple(idata.groups() if callable(idata.groups) else idata.children)
