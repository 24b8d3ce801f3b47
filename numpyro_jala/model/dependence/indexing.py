"""Rules for reading and writing at indices.

Known indices say which elements are read or written. Unknown ones may be anything, so
that all elements along the indexed axes are joined.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from numpyro_jala.model.dependence.graph import (
    Graph,
    Labels,
    Shape,
    combine,
    fill,
    join,
    merge,
)
from numpyro_jala.model.dependence.moves import Windows, positions, spread
from numpyro_jala.model.dependence.values import Value, concrete, out_shapes, tie

_PROMISE = GatherScatterMode.PROMISE_IN_BOUNDS


def gather(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Read labels at known indices; unknown ones may read anything along their axes."""
    operand, indices = inputs
    numbers, (shape,) = equation.params["dimension_numbers"], out_shapes(equation)
    clip = equation.params["mode"] != GatherScatterMode.FILL_OR_DROP
    windows = Windows._make([*numbers[:5], equation.params["slice_sizes"], clip])
    size, starts = (atom.aval.shape for atom in equation.invars)
    labels, known = operand.labels, concrete(indices)
    if known is None:
        joined = merge(graph, labels, windows.start_index_map)
        labels = None if joined is None else fill(joined, size)
        known = np.zeros(starts, np.int64)
    elif labels is not None and equation.params["mode"] == _PROMISE:
        _check_bounds(windows, size, known)
    read = None if labels is None else _take(labels, positions(windows, size, known, shape))
    index = merge(graph, indices.labels, [-1])
    if index is None:
        return [read]
    batch = [axis for axis in range(len(shape)) if axis not in windows.offset_dims]
    both = combine(graph, [read, spread(index[..., 0], batch, len(shape))])
    return [None if both is None else fill(both, shape)]


def _check_bounds(windows: Windows, size: Shape, known: np.ndarray) -> None:
    """Warn of an index beyond the end, which JAX takes for the last silently."""
    for column, axis in enumerate(windows.start_index_map):
        index = known[..., column].ravel()
        beyond = np.flatnonzero((index < 0) | (index > size[axis] - windows.sizes[axis]))
        if beyond.size:
            warnings.warn(
                f"The model reads at the index {index[beyond[0]]} (row {beyond[0]} of "
                f"{index.size}) where there are {size[axis]} values "
                "that depend on latents. JAX counts from zero, and silently takes the last "
                "value there. Check the groups of rows, or say what is meant by "
                ".at[index].get(mode='clip').",
                stacklevel=2,
            )


def _take(labels: Labels, where: Labels) -> Labels:
    return np.where(where < 0, -1, labels.ravel()[where])


def scatter(graph: Graph, equation: Any, inputs: Sequence[Value]) -> list[Labels | None]:
    """Write the labels of updates at known indices, over or into the operand's."""
    operand, indices, updates = inputs
    size, _, shape = (atom.aval.shape for atom in equation.invars)
    known = concrete(indices)
    if known is None:
        return tie(graph, equation, inputs)
    windows = _scatter_windows(equation, size, shape)
    where = positions(windows, size, known, shape).ravel()
    inside = where >= 0
    written, num_elements = np.zeros(int(np.prod(size)), bool), int(np.prod(size))
    written[where[inside]] = True
    labels = fill(updates.labels, shape).ravel()[inside]
    added = join(graph, where[inside], labels, num_elements)
    old = fill(operand.labels, size).ravel()
    if equation.primitive.name == "scatter" and equation.params["update_jaxpr"] is None:
        return [np.where(written, added, old).reshape(size)]
    both = combine(graph, [old, added])
    return [None if both is None else both.reshape(size)]


def _scatter_windows(equation: Any, size: Shape, shape: Shape) -> Windows:
    numbers = equation.params["dimension_numbers"]
    whole = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    lengths = iter(shape[axis] for axis in numbers.update_window_dims)
    sizes = tuple(1 if axis in whole else next(lengths) for axis in range(len(size)))
    clip = equation.params["mode"] == GatherScatterMode.CLIP
    return Windows._make([*numbers[:5], sizes, clip])


def dynamic_slice(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Cut at known starts; unknown ones may cut anywhere along the axes that are cut."""
    operand, *starts = inputs
    (shape,), size = out_shapes(equation), equation.invars[0].aval.shape
    known, labels = [concrete(start) for start in starts], operand.labels
    loose = [i for i, start in enumerate(known) if start is None and shape[i] < size[i]]
    if labels is not None:
        joined = merge(graph, labels, loose)
        labels = fill(joined, size)[_window(known, shape, size)]
    return [_with_starts(graph, labels, starts, shape)]


def dynamic_update_slice(
    graph: Graph, equation: Any, inputs: Sequence[Value]
) -> list[Labels | None]:
    """Write at known starts; unknown ones may write anywhere along the axes."""
    operand, update, *starts = inputs
    size, shape = (atom.aval.shape for atom in equation.invars[:2])
    known = [concrete(start) for start in starts]
    loose = [i for i, start in enumerate(known) if start is None and shape[i] < size[i]]
    if loose:
        cut = [i for i in range(len(size)) if shape[i] < size[i]]
        labels = combine(graph, [operand.labels, merge(graph, update.labels, cut)])
    else:
        labels = np.array(fill(operand.labels, size))
        labels[_window(known, shape, size)] = fill(update.labels, shape)
    return [_with_starts(graph, labels, starts, size)]


def _window(
    starts: Sequence[np.ndarray | None], shape: Shape, size: Shape
) -> tuple[slice, ...]:
    """Clip known starts into bounds, and take zero for unknown ones."""
    first = [
        0 if start is None else int(np.clip(start, 0, outer - inner))
        for start, inner, outer in zip(starts, shape, size, strict=True)
    ]
    return tuple(slice(at, at + inner) for at, inner in zip(first, shape, strict=True))


def _with_starts(
    graph: Graph, labels: Labels | None, starts: Sequence[Value], shape: Shape
) -> Labels | None:
    both = combine(graph, [labels, *(start.labels for start in starts)])
    return None if both is None else fill(both, shape)
