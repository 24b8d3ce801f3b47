"""Rules: how each primitive passes labels from its inputs to its outputs.

A rule is called when some input carries a label. It may make two elements depend on more
than they do, and never on less. A primitive without a rule has every output depend on
every input.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from numpyro_jala.model.dependence.graph import (
    Graph,
    Labels,
    Shape,
    accumulate,
    combine,
    fill,
    join,
    merge,
)
from numpyro_jala.model.dependence.indexing import (
    dynamic_slice,
    dynamic_update_slice,
    gather,
    scatter,
)
from numpyro_jala.model.dependence.moves import MOVES, select, spread
from numpyro_jala.model.dependence.values import Value, concrete, out_shapes, tie
from numpyro_jala.model.dependence.zeros import zeros

#: ``rule(graph, equation, inputs) -> labels of each output``.
Rule: TypeAlias = Callable[[Graph, Any, Sequence[Value]], list[Labels | None]]


def elementwise(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Have each element depend on the elements at its place."""
    labels = combine(graph, [each.labels for each in inputs])
    (shape,) = out_shapes(equation)
    if labels is not None and labels.ndim not in (0, len(shape)):
        return tie(graph, equation, inputs)  # a cast that splits or joins elements
    return [None if labels is None else fill(labels, shape)]


def _one_to_one(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    return [each.labels for each in inputs]


def _mul(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Multiply; what a known zero multiplies is dropped."""
    (labels,) = elementwise(graph, equation, inputs)
    (shape,) = out_shapes(equation)
    masks = [mask for each in inputs if (mask := zeros(each)) is not None]
    for mask in masks:
        if mask.any():
            labels = np.where(mask, -1, fill(labels, shape))
    return [labels]


def _select(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Choose by a known predicate exactly; an unknown one may choose any case."""
    predicate = concrete(inputs[0])
    if predicate is None:
        return elementwise(graph, equation, inputs)
    (shape,) = out_shapes(equation)
    return [select(predicate, [fill(each.labels, shape) for each in inputs[1:]])]


def _move(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Move labels as the primitive moves elements."""
    shapes = [atom.aval.shape for atom in equation.invars]
    full = [fill(each.labels, shape) for each, shape in zip(inputs, shapes, strict=True)]
    return list(MOVES[equation.primitive.name](equation.params, full))


def _reduce(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Join the labels along the reduced axes."""
    labels = merge(graph, inputs[0].labels, equation.params["axes"])
    return [None if labels is None else labels.reshape(out_shapes(equation)[0])]


def _cumulative(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    axis, reverse = equation.params["axis"], equation.params["reverse"]
    labels = inputs[0].labels
    return [None if labels is None else accumulate(graph, labels, axis, reverse)]


def _along(
    axis_name: str, graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Have all outputs depend on all inputs of their line along one axis."""
    both = combine(graph, [each.labels for each in inputs])
    labels = merge(graph, both, [equation.params[axis_name]])
    return [None if labels is None else fill(labels, out) for out in out_shapes(equation)]


def _batched(
    num_axes: int, graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Have all outputs depend on all of their matrix, or their vector, in a batch."""
    labels = merge(graph, inputs[0].labels, range(-num_axes, 0))
    if labels is None:
        return [None for _ in equation.outvars]
    batch = labels.reshape(labels.shape[:-num_axes])
    shapes, axes = out_shapes(equation), range(batch.ndim)
    return [fill(spread(batch, axes, len(shape)), shape) for shape in shapes]


def _triangular_solve(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Solve for each column by itself; all depend on the whole triangular matrix."""
    matrix = merge(graph, inputs[0].labels, [-2, -1])
    axis = -2 if equation.params["left_side"] else -1
    both = combine(graph, [matrix, merge(graph, inputs[1].labels, [axis])])
    return [None if both is None else fill(both, out_shapes(equation)[0])]


def _dot_general(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Join along the contracted axes; what a known zero multiplies is dropped."""
    numbers = equation.params["dimension_numbers"]
    sides = zip(inputs, equation.invars, *numbers, strict=True)
    left, right = (_Operand(*side) for side in sides)
    rows = _through(graph, right.nonzero(), left.labels)
    turned = None if rows is None else rows.swapaxes(1, 2)
    both = combine(graph, [turned, _through(graph, left.nonzero(), right.labels)])
    sizes = (left.shape[0], left.shape[1], right.shape[1])
    (shape,) = out_shapes(equation)
    return [None if both is None else fill(both, sizes).reshape(shape)]


class _Operand:
    """One side of a product, its axes in the order batch, free, contracted."""

    def __init__(self, value: Value, atom: Any, contracted: Shape, batch: Shape) -> None:
        size = atom.aval.shape
        free = [i for i in range(len(size)) if i not in {*contracted, *batch}]
        self.order = (*batch, *free, *contracted)
        lengths = [[size[i] for i in axes] for axes in (batch, free, contracted)]
        self.shape = tuple(int(np.prod(length)) for length in lengths)
        self.value = value
        self.labels = None if value.labels is None else self._arrange(value.labels)

    def _arrange(self, array: np.ndarray) -> np.ndarray:
        return array.transpose(self.order).reshape(self.shape)

    def nonzero(self) -> np.ndarray | None:
        """Mark the elements that may differ from zero, if that is known."""
        mask = zeros(self.value)
        return None if mask is None or not mask.any() else self._arrange(~mask)


def _through(
    graph: Graph, nonzero: np.ndarray | None, labels: Labels | None
) -> Labels | None:
    """Label the product of a matrix (batch, n, k) and the transpose of (batch, m, k).

    Only the labels of the second are passed on, through the nonzero elements of the
    first, or through all if ``nonzero`` is ``None``.
    """
    if nonzero is None or labels is None:
        columns = merge(graph, labels, [2])
        return None if columns is None else columns.swapaxes(1, 2)
    entry, row, inner = np.nonzero(nonzero)
    size = (*nonzero.shape[:2], labels.shape[1])
    groups = ((entry * size[1] + row) * size[2])[:, None] + np.arange(size[2])
    members = labels[entry, :, inner]
    return join(graph, groups.ravel(), members.ravel(), int(np.prod(size))).reshape(size)


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min
    mulhi name ne neg nextafter not or polygamma population_count pow random_gamma_grad
    real reduce_precision regularized_incomplete_beta rem round rsqrt sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub
    tan tanh xor zeta
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE.split(), elementwise),
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(["device_put", "optimization_barrier"], _one_to_one),
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), _cumulative),
    **dict.fromkeys(
        [f"reduce_{op}" for op in "sum max min prod and or xor".split()], _reduce
    ),
    **dict.fromkeys(["argmax", "argmin"], _reduce),
    **dict.fromkeys("cholesky eig eigh geqrf lu qr svd".split(), partial(_batched, 2)),
    **dict.fromkeys(
        [f"scatter{op}" for op in ("", "-add", "-sub", "-max", "-min")], scatter
    ),
    **dict.fromkeys(["scatter-mul", "scatter_mul", "scatter_add", "scatter_sub"], scatter),
    **dict.fromkeys(["scatter_max", "scatter_min"], scatter),
    "dot_general": _dot_general,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    "lu_pivots_to_permutation": partial(_batched, 1),
    "mul": _mul,
    "select_n": _select,
    "sort": partial(_along, "dimension"),
    "top_k": partial(_along, "axis"),
    "triangular_solve": _triangular_solve,
}
