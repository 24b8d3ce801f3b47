"""The terms of a sum, found in the program that adds them up.

Some programs return nothing but the sum of all terms, as where discrete latents are summed
out. Going back from that number through everything that only adds, one comes to arrays of
terms. What is added is *marked* by name, and a sum is taken apart only if each mark goes to
one of its parts: the logarithm of a sum of exponentials is added up from pieces too, but
they depend on the same marks, and none of them means anything by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from numpyro_jala._typing import Array

_NAMES = frozenset[str]


class _Step(NamedTuple):
    """An equation that was run, its values by their numbers."""

    equation: Any
    inputs: list[int]
    outputs: list[int]


class _Tape:
    """All values of a program in the order in which they were made.

    names
        The marks that each depends on.
    fixed
        The numbers that the program was written with, by the number of the value.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.names: list[_NAMES] = []
        self.fixed: dict[int, float] = {}
        self.steps: list[_Step] = []

    def add(self, value: Any, names: _NAMES = frozenset()) -> int:
        self.values.append(value)
        self.names.append(names)
        return len(self.values) - 1

    def size(self, number: int) -> int:
        return int(np.size(self.values[number]))

    def is_zero(self, number: int) -> bool:
        return self.fixed.get(number) == 0.0


def mark(array: Any, name: str) -> Array:
    """Mark what goes into a sum. Its value stays as it is."""
    marked: Array = checkpoint_name(jnp.asarray(array), name)  # type: ignore[no-untyped-call]
    return marked


def take_apart(program: Any) -> list[Array]:
    """Run a program, and return arrays whose entries add up to the number it returns.

    Parameters
    ----------
    program
        A closed jaxpr without arguments.

    Returns
    -------
    In the order of their marks, however the program adds them up.
    """
    tape = _Tape()
    consts = [tape.add(const) for const in program.consts]
    (result,) = _run(tape, program.jaxpr, consts, [])
    parts = _share_out(tape, result)
    ordered = sorted(parts, key=lambda number: (sorted(tape.names[number]), number))
    arrays = ((parts[number], jnp.asarray(tape.values[number])) for number in ordered)
    return [array if times == 1 else times * array for times, array in arrays]


def _run(
    tape: _Tape, jaxpr: Any, consts: Sequence[int], inputs: Sequence[int]
) -> list[int]:
    """Run a program and those that it calls, and note each value."""
    numbers = dict(zip(jaxpr.constvars, consts, strict=True))
    numbers |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> int:
        if not isinstance(atom, Literal):
            return numbers[atom]
        aval: Any = atom.aval
        number = tape.add(jnp.asarray(atom.val, aval.dtype))
        if aval.shape == ():
            tape.fixed[number] = float(atom.val)
        return number

    for equation in jaxpr.eqns:
        given = [read(atom) for atom in equation.invars]
        called = equation.params.get("jaxpr") if _is_call(equation) else None
        if called is not None:
            found = _run(tape, called.jaxpr, [tape.add(c) for c in called.consts], given)
        else:
            found = _bind(tape, equation, given)
        numbers.update(zip(equation.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _is_call(equation: Any) -> bool:
    return equation.primitive.name in ("jit", "pjit", "closed_call")


def _bind(tape: _Tape, equation: Any, given: list[int]) -> list[int]:
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    found = primitive.bind(*(tape.values[number] for number in given), **params)
    names = frozenset[str]().union(*(tape.names[number] for number in given))
    if primitive.name == "name":
        names |= {equation.params["name"]}
    results = found if primitive.multiple_results else [found]
    outputs = [tape.add(each, names) for each in results]
    tape.steps.append(_Step(equation, given, outputs))
    return outputs


def _share_out(tape: _Tape, result: int) -> dict[int, float]:
    """Return the values that make a sum, and how often each of them counts."""
    times, parts = {result: 1.0}, {}
    makers = {step.outputs[0]: step for step in tape.steps if len(step.outputs) == 1}
    for number in range(result, -1, -1):  # what is made of others comes after them
        count = times.get(number, 0.0)
        if not count or tape.is_zero(number):
            continue
        shares = _shares(tape, makers[number]) if number in makers else None
        if shares is None:
            parts[number] = count
            continue
        # Its parts share no mark, so that each is a part of no other sum.
        times |= {given: count * share for given, share in shares}
    return parts


def _shares(tape: _Tape, step: _Step) -> list[tuple[int, float]] | None:
    """Return how often a value counts each of those that it is made of.

    None where it does more than add, or where its parts share a mark or have none.
    """
    rule = _RULES.get(step.equation.primitive.name)
    if rule is None or not tape.size(step.outputs[0]):
        return None
    found = rule(tape, step)
    if found is None:
        return None
    shares = [(given, share) for given, share in found if not tape.is_zero(given)]
    names = [tape.names[given] for given, _ in shares]
    apart = sum(map(len, names)) == len(frozenset[str]().union(*names))
    return shares if apart and all(names) else None


#: ``rule(tape, step)``: the parts of a sum, and how often it counts the entries of each.
_Rule: TypeAlias = Callable[[_Tape, _Step], list[tuple[int, float]] | None]


def _once(tape: _Tape, step: _Step) -> list[tuple[int, float]] | None:
    """Count the entries of each input once: they are moved about, or summed."""
    return [(given, 1.0) for given in step.inputs]


def _with_signs(*signs: float) -> _Rule:
    """Count an input as often as its entries appear in the output."""

    def rule(tape: _Tape, step: _Step) -> list[tuple[int, float]] | None:
        size, pairs = tape.size(step.outputs[0]), zip(step.inputs, signs, strict=True)
        return [(given, sign * size / tape.size(given)) for given, sign in pairs]

    return rule


def _cast(tape: _Tape, step: _Step) -> list[tuple[int, float]] | None:
    """Count the entries of a cast that rounds no more than a sum does."""
    (given,) = step.inputs
    is_real = jnp.issubdtype(jnp.result_type(tape.values[given]), jnp.floating)
    keeps = is_real and jnp.issubdtype(step.equation.params["new_dtype"], jnp.floating)
    return [(given, 1.0)] if keeps else None


def _times(tape: _Tape, step: _Step) -> list[tuple[int, float]] | None:
    """Count entries as often as a number says that stands in the program."""
    first, second = step.inputs
    if first in tape.fixed:
        return [(second, tape.fixed[first])]
    return [(first, tape.fixed[second])] if second in tape.fixed else None


_RULES: dict[str, _Rule] = {
    **dict.fromkeys("concatenate copy reduce_sum reshape rev squeeze".split(), _once),
    **dict.fromkeys(["stack", "transpose"], _once),
    "add": _with_signs(1.0, 1.0),
    "add_any": _with_signs(1.0, 1.0),
    "broadcast_in_dim": _with_signs(1.0),
    "convert_element_type": _cast,
    "mul": _times,
    "neg": _with_signs(-1.0),
    "sub": _with_signs(1.0, -1.0),
}
