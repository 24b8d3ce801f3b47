"""Compile programs before they are needed, and forget them before there are too many.

A run calls a handful of large programs one after the other, and on a CPU each takes seconds
to compile: so all are begun at once. NumPyro's handlers belong to one thread, so programs
are traced where they are asked for and only compiled beside.

A system limits the memory maps of a process, Linux mostly to 65,530. On a CPU the programs
of one model take thousands of them, and a process that runs out of them is killed without
a message. So a loop over models, or over data that a model has to look at, may not keep them all.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from numpyro_jala.backend.blocks import num_cores

#: Threads that compile; each has helpers of its own.
_POOL = ThreadPoolExecutor(2, "compile")
#: With fewer cores than this one program keeps them all busy.
_MANY_CORES = 3
#: Options for a program that is called once or a few times on little data.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
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


def pays_ahead() -> bool:
    """Tell whether programs are sooner ready if they are compiled at the same time.

    On an accelerator they are not: what is compiled there is tried out there.
    """
    return jax.default_backend() == "cpu" and num_cores() >= _MANY_CORES


class Programs:
    """Jitted functions that are being compiled."""

    def __init__(self) -> None:
        self._begun: dict[Any, Future[Any]] = {}

    def begin(self, program: Any, *args: Any) -> Any:
        """Compile a program for such arguments; return the shapes of what it gives.

        The arguments may be shapes themselves.
        """
        traced = program.lower(*args)
        self._begun[program] = _POOL.submit(traced.compile)
        return traced.out_info

    def ready(self, program: Any) -> Any:
        """Return a program, compiled if that was begun."""
        if program in self._begun:
            self._begun.pop(program).result()
        return program
