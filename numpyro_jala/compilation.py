"""Compile programs for models, and forget them before there are too many.

A system limits the memory maps of a process, Linux mostly to 65,530. On a CPU the programs
of one model take thousands of them, and a process that has no more is ended without a word.
So a loop over models, or over data that a model has to look at, may not keep them all.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

_MAPS, _MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
#: Share of the maps that may be taken before the next model.
_ENOUGH = 0.6

_programs: list[Any] = []


def compiled(function: Callable[..., Any], num_static: int = 1) -> Callable[..., Any]:
    """Compile a function for each problem, its first argument, and the shapes of the rest.

    ``num_static`` counts the first arguments that a program depends on.
    """
    program = jax.jit(function, static_argnums=tuple(range(num_static)))
    _programs.append(program)
    return program


def share_of_maps() -> float:
    """Return the share of its memory maps that this process has taken, if it can be seen."""
    if not (_MAPS.exists() and _MOST_MAPS.exists()):
        return 0.0
    return _MAPS.read_bytes().count(b"\n") / int(_MOST_MAPS.read_text())


def make_room() -> None:
    """Forget all programs if there is no room for those of one more problem.

    Those of a problem that is still in use are then compiled again.
    """
    if share_of_maps() > _ENOUGH:
        for program in _programs:
            program.clear_cache()
