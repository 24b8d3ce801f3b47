"""Elements that are zero whatever the params and the position.

A design matrix that is scaled by a param is not known, but its zeros are, and what they
multiply drops out of the density.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from numpyro_jala.model.dependence.moves import MOVES, select
from numpyro_jala.model.dependence.values import Known, Value, concrete, entry, out_shapes

#: For each output the mask of its zeros, ``None`` where nothing is known.
Masks: TypeAlias = list[np.ndarray] | None


def zeros(value: Value) -> np.ndarray | None:
    """Mark the elements that are known to be zero; ``None`` if nothing is known."""
    array = concrete(value)
    if array is not None:
        return np.asarray(array == 0)
    return None if value.zeros is None else value.zeros.value


def with_zeros(
    equation: Any, inputs: Sequence[Value], results: Sequence[Value]
) -> list[Value]:
    """Add what is known of zeros to the outputs of an equation."""
    rule = RULES.get(equation.primitive.name)
    sources = [each for value in inputs for each in (value.known, value.zeros) if each]
    if rule is None or not sources or all(each.known is not None for each in results):
        return list(results)
    masks = Known(partial(rule, equation, inputs), 1 + max(each.depth for each in sources))
    return [
        Value(each.labels, each.known, Known(partial(entry, masks, i), masks.depth + 1))
        for i, each in enumerate(results)
    ]


def _product(equation: Any, inputs: Sequence[Value]) -> Masks:
    masks = [mask for each in inputs if (mask := zeros(each)) is not None]
    (shape,) = out_shapes(equation)
    return [np.broadcast_to(np.logical_or(masks[0], masks[-1]), shape)] if masks else None


def _sum(equation: Any, inputs: Sequence[Value]) -> Masks:
    first, second = map(zeros, inputs)
    if first is None or second is None:
        return None
    return [np.broadcast_to(first & second, out_shapes(equation)[0])]


def _same(equation: Any, inputs: Sequence[Value]) -> Masks:
    mask = zeros(inputs[0])
    return None if mask is None else [mask]


def _chosen(equation: Any, inputs: Sequence[Value]) -> Masks:
    (shape,), predicate = out_shapes(equation), concrete(inputs[0])
    masks = [_full(each, shape) for each in inputs[1:]]
    return [np.logical_and.reduce(masks) if predicate is None else select(predicate, masks)]


def _moved(equation: Any, inputs: Sequence[Value]) -> Masks:
    shapes = [atom.aval.shape for atom in equation.invars]
    masks = [_full(each, shape) for each, shape in zip(inputs, shapes, strict=True)]
    return MOVES[equation.primitive.name](equation.params, masks)


def _full(value: Value, shape: tuple[int, ...]) -> np.ndarray:
    mask = zeros(value)
    return np.broadcast_to(np.bool_(False) if mask is None else mask, shape)


RULES: dict[str, Callable[[Any, Sequence[Value]], Masks]] = {
    **dict.fromkeys("abs convert_element_type neg sign sqrt square".split(), _same),
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(["add", "sub"], _sum),
    "mul": _product,
    "select_n": _chosen,
}
