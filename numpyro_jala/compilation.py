"""Forget compiled programs before there are too many.

A system limits the memory maps of a process, Linux mostly to 65,530. On a CPU the programs
of one model take thousands of them, and a process that has no more is ended without a word.
So a loop over models, or over data that a model has to look at, may not keep them all.
"""

from pathlib import Path

import jax

#: Share of the memory maps that may be taken when a run begins.
_ENOUGH = 0.6


def share_of_maps() -> float:
    """Return the share of its memory maps that this process has taken, if it can be seen."""
    try:
        taken = Path("/proc/self/maps").read_bytes().count(b"\n")
        return taken / int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:
        return 0.0


def make_room() -> bool:
    """Forget all compiled programs if one more model's may not fit; tell whether.

    Also those of other libraries, since what JAX keeps of one model cannot be told apart.
    What is still in use is compiled again.
    """
    if share_of_maps() <= _ENOUGH:
        return False
    jax.clear_caches()  # type: ignore[no-untyped-call]
    return True
