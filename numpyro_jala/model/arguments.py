"""The arguments of a model: arrays, and what fixes its structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, Tree


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
    plate of size ``group.max() + 1``): other data then mean another compilation.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_data = [
        isinstance(leaf, np.ndarray | jax.Array) and not keep_arrays for leaf in leaves
    ]
    frozen = tuple(
        None if data else Frozen(leaf) for leaf, data in zip(leaves, is_data, strict=True)
    )
    arrays = [jnp.asarray(leaf) for leaf, data in zip(leaves, is_data, strict=True) if data]
    return Call(tree, frozen), arrays


def as_jax_arrays(tree: Tree) -> Tree:
    """Make JAX arrays of the NumPy arrays of numbers in a tree."""

    def convert(leaf: Any) -> Any:
        is_numbers = isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"
        return jnp.asarray(leaf) if is_numbers else leaf

    return jax.tree.map(convert, tree)
