"""The walk over a program: its equations in order, into calls, branches and loops."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from numpyro_jala.backend.blocks import inner_programs
from numpyro_jala.backend.loops import Loop, counters, read_loop
from numpyro_jala.model.dependence.graph import Graph, Labels, combine, fill, merge
from numpyro_jala.model.dependence.rules import RULES
from numpyro_jala.model.dependence.values import (
    UNKNOWN,
    Value,
    concrete,
    constant,
    index,
    outputs,
    tie,
)
from numpyro_jala.model.dependence.zeros import with_zeros

#: ``flow(graph, equation, inputs) -> outputs``, for primitives that hold programs.
Flow: TypeAlias = Callable[[Graph, Any, Sequence[Value]], list[Value]]

#: Loops of up to this many equations in all are followed from one iteration to the next.
MAX_UNROLLED = 50_000


def walk(graph: Graph, program: Any, inputs: Sequence[Value]) -> list[Value]:
    """Label the outputs of a program.

    Parameters
    ----------
    graph
        Gains the nodes of all equations.
    program
        A jaxpr, closed or open.
    inputs
        The values of its arguments.
    """
    jaxpr = getattr(program, "jaxpr", program)
    values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
    values |= zip(
        jaxpr.constvars, map(constant, getattr(program, "consts", ())), strict=True
    )

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return constant(np.asarray(atom.val, aval.dtype))
        return values[atom]

    for equation in jaxpr.eqns:
        results = _apply(graph, equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Value]:
    name = equation.primitive.name
    program = _called(equation, len(inputs))
    if program is not None:
        return walk(graph, program, inputs)
    if all(each.labels is None for each in inputs):
        return with_zeros(equation, inputs, outputs(equation, inputs))
    if name in FLOWS:
        return FLOWS[name](graph, equation, inputs)
    results = _values(RULES.get(name, tie)(graph, equation, inputs))
    return with_zeros(equation, inputs, results)


def _values(labels: Sequence[Labels | None]) -> list[Value]:
    return [Value(each) for each in labels]


_CALLS = frozenset(
    """
    call checkpoint closed_call composite core_call core_closed_call custom_jvp_call
    custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr jit pjit remat remat2
    remat_opt
    """.split()
)


def _called(equation: Any, num_inputs: int) -> Any:
    """Find the program that a call runs on its inputs; ``None`` if it is no call."""
    if equation.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        program = equation.params.get(name)
        jaxpr = getattr(program, "jaxpr", program)
        if jaxpr is not None and len(jaxpr.invars) == num_inputs:
            return program
    return None


def _cond(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Value]:
    """Follow the branch that is taken, or all of them if that is not known."""
    choice, *operands = inputs
    branches, taken = equation.params["branches"], concrete(choice)
    if taken is not None:
        number = int(np.clip(taken, 0, len(branches) - 1))
        return walk(graph, branches[number], operands)
    results = [walk(graph, branch, operands) for branch in branches]
    shapes = [out.aval.shape for out in equation.outvars]
    parts = [
        [fill(choice.labels, shape), *(each.labels for each in out)]
        for shape, *out in zip(shapes, *results, strict=True)
    ]
    return _values([combine(graph, part) for part in parts])


def _scan(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Value]:
    """Follow a short loop step by step, and a long one in all iterations at once."""
    scan = read_loop(equation, inputs)
    if scan.length * _num_equations(scan.body.jaxpr) <= MAX_UNROLLED:
        return _unrolled(graph, scan)
    try:
        results = _parallel(graph, scan)
    except NotImplementedError:  # a primitive that cannot be batched
        results = None
    return _folded(graph, scan) if results is None else results


def _num_equations(jaxpr: Any) -> int:
    """Count equations, with those of inner programs and of inner loops' iterations."""
    total = 0
    for equation in jaxpr.eqns:
        repeats = equation.params.get("length", 1)
        total += 1 + repeats * sum(map(_num_equations, inner_programs(equation)))
    return total


def _unrolled(graph: Graph, scan: Loop) -> list[Value]:
    """Label one iteration after the other."""
    carry, rows = scan.carry, []
    order = slice(None, None, -1 if scan.reverse else 1)
    for step in range(scan.length)[order]:
        entries = [index(each, step) for each in scan.sequences]
        results = walk(graph, scan.body, [*scan.consts, *carry, *entries])
        carry = results[: len(carry)]
        rows.append(results[len(carry) :])
    num_outputs = len(scan.body.jaxpr.outvars) - len(carry)
    columns = ([row[i] for row in rows[order]] for i in range(num_outputs))
    return [*carry, *map(_stack, columns)]


def _stack(column: Sequence[Value]) -> Value:
    """Stack the labels of an output over the iterations."""
    present = [each.labels for each in column if each.labels is not None]
    if not present:
        return UNKNOWN
    return Value(np.stack([fill(each.labels, present[0].shape) for each in column]))


def _parallel(graph: Graph, scan: Loop) -> list[Value] | None:
    """Label all iterations at once, if no label passes from one to the next.

    The body is batched over the iterations and walked with a carry that has no label
    and of which only counters are known. If then none comes out with a label, none ever
    has one, by induction.
    """
    if any(each.labels is not None for each in scan.carry):
        return None
    order = slice(None, None, -1 if scan.reverse else 1)
    counts = counters(scan, [concrete(each) for each in scan.carry])
    carry = [UNKNOWN if count is None else constant(count[order]) for count in counts]
    axes = [
        *[None] * len(scan.consts),
        *(None if each is UNKNOWN else 0 for each in carry),
        *[0] * len(scan.sequences),
    ]
    body = jax.vmap(jaxpr_as_fun(scan.body), in_axes=axes, axis_size=scan.length)
    arguments = [
        _argument(variable.aval, None if axis is None else scan.length)
        for variable, axis in zip(scan.body.jaxpr.invars, axes, strict=True)
    ]
    program = jax.make_jaxpr(body)(*arguments)
    results = walk(graph, program, [*scan.consts, *carry, *scan.sequences])
    carried = [each.labels for each in results[: len(carry)] if each.labels is not None]
    if any((labels >= 0).any() for labels in carried):
        return None
    return [*[UNKNOWN] * len(carry), *results[len(carry) :]]


def _argument(aval: Any, length: int | None) -> Any:
    struct: Any = jax.ShapeDtypeStruct
    return struct(aval.shape if length is None else (length, *aval.shape), aval.dtype)


def _folded(graph: Graph, scan: Loop) -> list[Value]:
    """Label one iteration that stands for all of them.

    Each element of the carry gets a node for what it depends on in any iteration, and
    sequences are joined along the iterations. The chains of independent groups, which
    are different elements of the carry, stay apart.
    """
    variables, size = scan.body.jaxpr.outvars, len(scan.carry)
    shapes = [variable.aval.shape for variable in variables]
    nodes = [graph.add(int(np.prod(shape))).reshape(shape) for shape in shapes[:size]]
    joined = [merge(graph, each.labels, [0]) for each in scan.sequences]
    entries = [UNKNOWN if each is None else Value(each[0]) for each in joined]
    results = walk(graph, scan.body, [*scan.consts, *map(Value, nodes), *entries])
    for node, *values in zip(nodes, scan.carry, results[:size], strict=True):
        for value in values:
            labels = fill(value.labels, node.shape)
            graph.link(node[labels >= 0], labels[labels >= 0])
    stacks = [
        UNKNOWN if each.labels is None else Value(fill(each.labels, (scan.length, *shape)))
        for each, shape in zip(results[size:], shapes[size:], strict=True)
    ]
    return [*map(Value, nodes), *stacks]


def _linear_solve(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Value]:
    """Follow the program that solves, with the constants that are its own."""
    lengths = equation.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    own = inputs[first : first + lengths.solve]
    sides = inputs[sum(lengths) :]
    return walk(graph, equation.params["jaxprs"].solve, [*own, *sides])


FLOWS: dict[str, Flow] = {
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
    "linear_solve": _linear_solve,
    "scan": _scan,
}
