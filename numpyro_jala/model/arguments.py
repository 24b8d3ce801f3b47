"""The arguments of a model: arrays, and what fixes its structure."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, Tree
from numpyro_jala.backend.sharding import is_key


class Frozen:
    """A value of any kind, hashed by its content, that a compiled function may fix."""

    def __init__(self, value: Any) -> None:
        self.value = value
        is_array = isinstance(value, np.ndarray | jax.Array)
        data = np.asarray(value) if is_array else None
        self.key = (
            (type(value).__name__, repr(value) if isinstance(value, float) else value)
            if data is None
            else (data.shape, str(data.dtype), data.tobytes())
        )

    def __hash__(self) -> int:
        """Hash the content."""
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        """Compare the content."""
        return isinstance(other, Frozen) and self.key == other.key


@dataclass(frozen=True)
class Call:
    """The arguments of a model without their arrays: what a compilation depends on."""

    tree: Any
    frozen: tuple[Frozen | None, ...]  # None where an array goes

    def fill(self, arrays: list[Array]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with the arrays in place."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf.value for leaf in self.frozen]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs


def split_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], keep_arrays: bool
) -> tuple[Call, list[Array]]:
    """Part the arrays among a model's arguments from what fixes its structure.

    With ``keep_arrays`` the arrays stay in the call, for models that look at values (a
    plate of size ``group.max() + 1``): other data then mean another compilation. Those that
    are traced have no values to keep.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_data = [is_traced(leaf) or (_is_array(leaf) and not keep_arrays) for leaf in leaves]
    frozen = tuple(
        None if data else Frozen(leaf) for leaf, data in zip(leaves, is_data, strict=True)
    )
    with jax.core.eval_context():  # within a trace what is known would else be traced
        arrays = [
            jnp.asarray(leaf) for leaf, data in zip(leaves, is_data, strict=True) if data
        ]
    return Call(tree, frozen), arrays


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array)


def is_traced(leaf: Any) -> bool:
    """Tell whether JAX traces a function of this, so that its value is not known."""
    return isinstance(leaf, jax.core.Tracer)


def name_arrays(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Name the arrays among a model's arguments, in the order in which they are parted."""
    try:
        names = list(inspect.signature(model).parameters)
    except (TypeError, ValueError):  # what is callable need not have a signature
        names = []
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        if _is_array(leaf):
            first: Any = getattr(path[1], "idx", getattr(path[1], "key", ""))
            is_named = isinstance(first, int) and first < len(names)
            name = names[first] if is_named else first
            found.append(f"{name!r}{jax.tree_util.keystr(path[2:])}")
    return found


def as_jax_arrays(tree: Tree) -> Tree:
    """Make JAX arrays of the NumPy arrays of numbers in a tree."""

    def convert(leaf: Any) -> Any:
        is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        return jnp.asarray(leaf) if is_numbers else leaf

    return jax.tree.map(convert, tree)


def _named(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Return the known arrays among a model's arguments, named as in a sentence."""
    for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        is_array = isinstance(leaf, np.ndarray | jax.Array)
        if is_array and not isinstance(leaf, jax.core.Tracer) and not is_key(leaf):
            first = path[1]
            name = f"Argument {getattr(first, 'idx', getattr(first, 'key', ''))!r}"
            yield name, np.asarray(leaf)


def check_integers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse integers that JAX would wrap around to others silently."""
    for name, leaf in _named(args, kwargs):
        if leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        kept = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
        if kept == leaf.dtype:
            continue
        bounds, value = np.iinfo(kept), max(leaf.max(), leaf.min(), key=abs)
        if not bounds.min <= value <= bounds.max:
            raise ValueError(
                f"{name} of the model holds the integer {value}, which is beyond {kept}: "
                "JAX would wrap it around to another one. Subtract a constant first, pass "
                "floats, or turn on double precision (jax_enable_x64)."
            )


def describe_not_finite(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say where an argument holds the first number that is not finite; empty if none does."""
    for name, leaf in _named(args, kwargs):
        if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
            index = tuple(map(int, np.argwhere(~np.isfinite(leaf))[0]))
            return f"{name} holds {leaf[index]} at the index {index}."
    return ""
