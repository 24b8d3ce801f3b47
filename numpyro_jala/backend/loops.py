"""Read the equation of a loop, in any version of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal


class Loop(NamedTuple):
    """The inputs of a scan, and how it runs.

    consts, carry, sequences
        What is the same in all turns, what passes from one to the next, and what each
        turn takes an entry of.
    """

    consts: list[Any]
    carry: list[Any]
    sequences: list[Any]
    body: Any
    length: int
    reverse: bool


def read_loop(equation: Any, inputs: Sequence[Any]) -> Loop:
    """Read the equation of a scan."""
    params, values = equation.params, list(inputs)
    run = params["jaxpr"], params["length"], params["reverse"]
    if "num_consts" in params:
        first = params["num_consts"]
        last = first + params["num_carry"]
        return Loop(values[:first], values[first:last], values[last:], *run)
    # JAX 0.11 and later keep the inputs as a tree.
    consts, carry, sequences = map(list, params["ft_in"].update(values).unpack())
    return Loop(consts, carry, sequences, *run)


def counters(loop: Loop, starts: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """List the values of each entry of the carry that counts, turn by turn.

    A counter starts at a known number and grows by a literal one. For other entries the
    list has ``None``.
    """
    jaxpr, first = loop.body.jaxpr, len(loop.consts)
    makers = {equation.outvars[0]: equation for equation in jaxpr.eqns if equation.outvars}
    results: list[np.ndarray | None] = []
    for i, start in enumerate(starts):
        out = jaxpr.outvars[i]
        maker = None if isinstance(out, Literal) else makers.get(out)
        step = None if maker is None else _step(maker, jaxpr.invars[first + i])
        if step is None or start is None or start.ndim or start.dtype.kind not in "iu":
            results.append(None)
            continue
        results.append((start + step * np.arange(loop.length)).astype(start.dtype))
    return results


def _step(equation: Any, counter: Any) -> int | None:
    """Return what an equation adds to a counter, if that is all it does."""
    if equation.primitive.name != "add":
        return None
    first, second = equation.invars
    if isinstance(first, Literal):
        first, second = second, first
    return int(second.val) if first is counter and isinstance(second, Literal) else None
