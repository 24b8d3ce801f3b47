"""What can be said of a loop without following it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from numpyro_jala.backend.blocks import inner_programs
from numpyro_jala.model.dependence.values import Value, concrete


class Loop(NamedTuple):
    """The inputs of a scan, and how it runs.

    consts, carry, sequences
        What is the same in all iterations, what passes from one to the next, and what
        each iteration takes an entry of.
    """

    consts: list[Value]
    carry: list[Value]
    sequences: list[Value]
    body: Any
    length: int
    reverse: bool


def loop(equation: Any, inputs: Sequence[Value]) -> Loop:
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


def counters(scan: Loop) -> list[np.ndarray | None]:
    """List the values in all iterations of each entry of the carry that counts.

    A counter starts at a known number and grows by a literal one. For other entries the
    list has ``None``.
    """
    jaxpr, first = scan.body.jaxpr, len(scan.consts)
    makers = {equation.outvars[0]: equation for equation in jaxpr.eqns if equation.outvars}
    results: list[np.ndarray | None] = []
    for i, value in enumerate(scan.carry):
        out, start = jaxpr.outvars[i], concrete(value)
        maker = None if isinstance(out, Literal) else makers.get(out)
        step = None if maker is None else _step(maker, jaxpr.invars[first + i])
        if step is None or start is None or start.ndim or start.dtype.kind not in "iu":
            results.append(None)
            continue
        counts = (start + step * np.arange(scan.length)).astype(start.dtype)
        results.append(counts[::-1] if scan.reverse else counts)
    return results


def _step(equation: Any, counter: Any) -> int | None:
    """Return what an equation adds to a counter, if that is all it does."""
    if equation.primitive.name != "add":
        return None
    first, second = equation.invars
    if isinstance(first, Literal):
        first, second = second, first
    return int(second.val) if first is counter and isinstance(second, Literal) else None


def num_equations(jaxpr: Any) -> int:
    """Count equations, with those of inner programs and of inner loops' iterations."""
    total = 0
    for equation in jaxpr.eqns:
        repeats = equation.params.get("length", 1)
        total += 1 + repeats * sum(map(num_equations, inner_programs(equation)))
    return total
