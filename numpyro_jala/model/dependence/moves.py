"""How data move, in NumPy: the same functions move values and labels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from numpyro_jala.model.dependence.graph import Labels, Shape

Params: TypeAlias = dict[str, Any]


def select(predicate: np.ndarray, cases: Sequence[np.ndarray]) -> np.ndarray:
    """Choose, element by element, the case that ``predicate`` numbers."""
    result = np.broadcast_to(cases[0], np.broadcast_shapes(predicate.shape, cases[0].shape))
    for number, case in enumerate(cases[1:], start=1):
        result = np.where(predicate == number, case, result)
    return result


def _broadcast_in_dim(params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    shape = tuple(params["shape"])
    aligned = spread(arrays[0], params["broadcast_dimensions"], len(shape))
    return [np.broadcast_to(aligned, shape)]


def _iota(params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    shape, axis = tuple(params["shape"]), params["dimension"]
    steps = np.arange(shape[axis]).astype(params["dtype"])
    return [np.broadcast_to(spread(steps, [axis], len(shape)), shape)]


def _slice(params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    strides = params["strides"] or [1] * arrays[0].ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return [arrays[0][tuple(slice(*bound) for bound in bounds)]]


def _pad(params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    operand, padding = arrays
    sizes, reads, writes = [], [], []
    for length, (low, high, interior) in zip(
        operand.shape, params["padding_config"], strict=True
    ):
        sizes.append(low + high + length + max(length - 1, 0) * interior)
        places = low + np.arange(length) * (interior + 1)
        # Negative padding cuts elements off.
        reads.append(np.flatnonzero((places >= 0) & (places < sizes[-1])))
        writes.append(places[reads[-1]])
    result = np.full(sizes, padding, operand.dtype)
    result[np.ix_(*writes)] = operand[np.ix_(*reads)]
    return [result]


def _split(params: Params, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return np.split(arrays[0], np.cumsum(params["sizes"])[:-1], params["axis"])


#: Primitives that move elements: the same function moves values and labels.
MOVES: dict[str, Callable[[Params, Sequence[np.ndarray]], list[np.ndarray]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": lambda params, arrays: [np.concatenate(arrays, params["dimension"])],
    "copy": lambda params, arrays: [arrays[0]],
    "copy_p": lambda params, arrays: [arrays[0]],
    "iota": _iota,
    "pad": _pad,
    "reshape": lambda params, arrays: [arrays[0].reshape(params["new_sizes"])],
    "rev": lambda params, arrays: [np.flip(arrays[0], params["dimensions"])],
    "slice": _slice,
    "split": _split,
    "stack": lambda params, arrays: [np.stack(arrays, params["axis"])],
    "squeeze": lambda params, arrays: [np.squeeze(arrays[0], tuple(params["dimensions"]))],
    "stop_gradient": lambda params, arrays: [arrays[0]],
    "tile": lambda params, arrays: [np.tile(arrays[0], params["reps"])],
    "transpose": lambda params, arrays: [np.transpose(arrays[0], params["permutation"])],
    "unstack": lambda params, arrays: list(np.moveaxis(arrays[0], params["axis"], 0)),
}


def spread(array: np.ndarray, axes: Sequence[int], rank: int) -> np.ndarray:
    """Lay the axes of ``array`` along ``axes`` of an array of ``rank`` axes."""
    shape = [1] * rank
    for axis, size in zip(axes, array.shape, strict=True):
        shape[axis] = size
    return array.reshape(shape)


class Windows(NamedTuple):
    """Where a gather reads its windows, or a scatter writes them.

    The first fields are those of ``GatherDimensionNumbers``; ``sizes`` are a window's
    lengths along the axes of the operand. A window out of bounds is moved inside if
    ``clip`` is true, and else not read or written at all.
    """

    offset_dims: Shape
    collapsed_slice_dims: Shape
    start_index_map: Shape
    operand_batching_dims: Shape
    start_indices_batching_dims: Shape
    sizes: Shape
    clip: bool


def positions(
    windows: Windows, operand_shape: Shape, indices: np.ndarray, shape: Shape
) -> Labels:
    """Find the element of the flattened operand behind each element of the windows.

    Parameters
    ----------
    windows
        The layout.
    operand_shape
        The shape of what is read or written.
    indices
        The start of each window; the last axis is the vector of starts.
    shape
        The shape of a gather's output, or of a scatter's updates.

    Returns
    -------
    Positions of the given shape, -1 where a window is out of bounds.
    """
    place = partial(spread, rank=len(shape))
    batch = [axis for axis in range(len(shape)) if axis not in windows.offset_dims]
    whole = {*windows.collapsed_slice_dims, *windows.operand_batching_dims}
    offsets = iter(windows.offset_dims)
    result, inside = np.zeros(shape, np.int64), np.ones((1,) * len(shape), bool)
    strides = np.cumprod([1, *operand_shape[:0:-1]])[::-1]
    for axis, (length, size) in enumerate(zip(operand_shape, windows.sizes, strict=True)):
        along = np.zeros((1,) * len(shape), np.int64)
        if axis in windows.start_index_map:
            column = windows.start_index_map.index(axis)
            start = place(indices[..., column].astype(np.int64), batch)
            along = np.clip(start, 0, length - size)
            inside = inside & (windows.clip | (along == start))
        if axis in windows.operand_batching_dims:
            entry = windows.operand_batching_dims.index(axis)
            along = place(
                np.arange(length), [batch[windows.start_indices_batching_dims[entry]]]
            )
        if axis not in whole:
            along = along + place(np.arange(size), [next(offsets)])
        result += along * strides[axis]
    return np.where(inside, result, -1)
