"""Values that are known before the program runs.

Indices, masks and design matrices are constants of the program. A known value is
evaluated only when a rule asks for it, with NumPy where that is easy: each primitive
that JAX runs by itself is compiled for each shape.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala.model.dependence.graph import Graph, Labels, Shape, fill, merge
from numpyro_jala.model.dependence.moves import MOVES, select

#: A chain of unevaluated values longer than this is evaluated at once, as Python's stack
#: is not deep enough for the counter of a long loop.
MAX_DEPTH = 50


class Known:
    """A value computed from constants alone, evaluated when it is first asked for.

    The value is ``None`` where it turns out that JAX cannot evaluate it.
    """

    def __init__(self, compute: Callable[[], Any], depth: int = 0) -> None:
        self.compute = compute
        self.depth = 0 if depth > MAX_DEPTH else depth
        if depth > MAX_DEPTH:
            _ = self.value

    @cached_property
    def value(self) -> Any:
        """Evaluate, the first time."""
        return self.compute()


class Value(NamedTuple):
    """What is known of an array in the program.

    labels
        The label of each element, ``None`` where all are -1.
    known
        The array itself, if it depends neither on params nor on the position.
    zeros
        Else the mask of elements that are zero all the same.
    """

    labels: Labels | None
    known: Known | None = None
    zeros: Known | None = None


#: An array that depends on params and on no coordinate.
UNKNOWN = Value(None)


def constant(array: Any) -> Value:
    """Wrap an array that the program holds."""
    return Value(None, Known(partial(_as_numpy, array)))


def concrete(value: Value) -> np.ndarray | None:
    """Evaluate an array if it is known, and else return ``None``."""
    array = None if value.known is None else value.known.value
    return array if isinstance(array, np.ndarray) else None


def index(value: Value, position: int) -> Value:
    """Take the entry at ``position`` of the first axis."""
    labels = None if value.labels is None else np.asarray(value.labels[position])
    known = value.known
    if known is None:
        return Value(labels)
    return Value(labels, Known(partial(entry, known, position), known.depth + 1))


def outputs(equation: Any, inputs: Sequence[Value]) -> list[Value]:
    """Describe the outputs of an equation none of whose inputs carries a label."""
    known = [value.known for value in inputs if value.known is not None]
    if len(known) < len(inputs):
        return [UNKNOWN for _ in equation.outvars]
    depth = 1 + max((each.depth for each in known), default=0)
    results = Known(partial(_evaluate, equation, known), depth)
    return [
        Value(None, Known(partial(entry, results, i), results.depth + 1))
        for i in range(len(equation.outvars))
    ]


def out_shapes(equation: Any) -> list[Shape]:
    """Return the shapes of an equation's outputs."""
    return [tuple(getattr(out.aval, "shape", ())) for out in equation.outvars]


def tie(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Have every element of every output depend on all inputs."""
    parts = [each.labels.ravel() for each in inputs if each.labels is not None]
    label = merge(graph, np.concatenate(parts), [0]) if parts else None
    return [
        None if label is None else fill(label.reshape(()), out)
        for out in out_shapes(equation)
    ]


def entry(known: Known, position: int) -> Any:
    """Take the entry at ``position``, which may be one of several outputs."""
    return None if known.value is None else _as_numpy(known.value[position])


def _as_numpy(array: Any) -> Any:
    """Return a NumPy array, or the array itself if it holds random keys."""
    dtype = getattr(array, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended):
        return array
    return np.asarray(array)


def _evaluate(equation: Any, known: Sequence[Known]) -> list[Any] | None:
    """Run one equation on known inputs."""
    arrays = [each.value for each in known]
    if any(array is None for array in arrays):
        return None
    name, params = equation.primitive.name, equation.params
    if not all(isinstance(array, np.ndarray) for array in arrays):
        return _bind(equation, arrays)
    if name in MOVES:
        return MOVES[name](params, arrays)
    dtype = equation.outvars[0].aval.dtype
    # NumPy and XLA round floats out of range to different integers.
    rounds = name == "convert_element_type" and arrays[0].dtype.kind not in "iub"
    if name not in ARITHMETIC or (rounds and dtype.kind in "iu"):
        return _bind(equation, arrays)
    with np.errstate(all="ignore"):
        return [np.asarray(ARITHMETIC[name](*arrays), dtype)]


def _bind(equation: Any, arrays: Sequence[Any]) -> list[Any] | None:
    try:
        results = equation.primitive.bind(*arrays, **equation.params)
    except (NotImplementedError, TypeError, ValueError):
        return None  # to be unknown is never wrong
    results = results if equation.primitive.multiple_results else [results]
    return [_as_numpy(result) for result in results]


def _select(predicate: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return select(predicate, cases)


#: Primitives that NumPy evaluates to the same values as JAX for all types.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "convert_element_type": np.asarray,
    "eq": np.equal,
    "exp": np.exp,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "select_n": _select,
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "xor": np.bitwise_xor,
}
