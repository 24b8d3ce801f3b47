"""Compile programs soon, before they are needed, and forget them before there are too many.

A run calls a handful of large programs one after the other, and on a CPU each takes seconds
to compile: so all are begun at once. NumPyro's handlers belong to one thread, so programs
are traced where they are asked for and only compiled beside.

A system limits the memory maps of a process, Linux mostly to 65,530. On a CPU the programs
of one model take thousands of them, and a process that runs out of them is killed without
a message. So a loop over models, or over data that a model has to look at, may not keep them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_jala.backend.blocks import num_cores

#: Threads that compile; each has helpers of its own.
_POOL = ThreadPoolExecutor(2, "compile")
#: With two cores one program is traced while another compiles: a tenth of a first fit.
_MANY_CORES = 2
#: Options for a program that is called once or a few times on little data.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
#: Options for all other programs, by backend; not every version of XLA knows each. On a CPU
#: a first fit of 1,000 groups took 25 s with them and 40 s without, a second one 3.2 and
#: 3.0. On an H200, where Triton's products of matrices are tried out one by one, a first fit
#: of 4,100 crossed effects took 39 s and 131 s, a second one of a million groups 8.4 and 7.8.
_SOON: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 1},
    "gpu": {"xla_gpu_enable_triton_gemm": False},
}
#: Share of the memory maps that may be taken when a run begins.
_ENOUGH = 0.6


class Program:
    """A jitted function that is soon compiled."""

    def __init__(self, function: Callable[..., Any], static_argnums: Any) -> None:
        functools.update_wrapper(self, function)
        self._jit = functools.partial(jax.jit, function, static_argnums=static_argnums)
        self._inner = self._jit()  # options are those of the outermost program alone

    @functools.cached_property
    def _outermost(self) -> Any:
        return self._jit(compiler_options=options_to_compile_soon())

    @property
    def num_compiled(self) -> int:
        """For how many kinds of arguments it was compiled."""
        return int(self._outermost._cache_size())

    def __call__(self, *args: Any) -> Any:
        """Run the program."""
        is_traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        return (self._inner if is_traced else self._outermost)(*args)

    def lower(self, *args: Any) -> Any:
        """Trace the program for such arguments, down to what is compiled."""
        return self._outermost.lower(*args)

    def trace(self, *args: Any) -> Any:
        """Trace the program for such arguments, and return what JAX makes of it."""
        return self._outermost.trace(*args).jaxpr.jaxpr


def program(static_argnums: int | tuple[int, ...]) -> Callable[..., Program]:
    """Make a decorator that jits a function."""
    return functools.partial(Program, static_argnums=static_argnums)


@functools.cache
def options_to_compile_soon() -> dict[str, Any]:
    """Return those options that this version of XLA has."""
    wanted = _SOON.get(jax.default_backend(), {})
    return {name: value for name, value in wanted.items() if _has_option(name, value)}


def _has_option(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


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
