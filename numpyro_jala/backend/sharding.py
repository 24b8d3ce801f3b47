"""Islands on many devices.

Each device of a mesh holds some of the islands, whole, and moves them. What islands tell
each other are moments, scores and evidences: no particle goes from one device to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_jala._typing import Tree

Function = TypeVar("Function", bound=Callable[..., Any])

_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


@contextmanager
def over(mesh: Mesh | None) -> Iterator[None]:
    """Trace what follows for islands that lie on the devices of a mesh."""
    token = _MESH.set(mesh)
    try:
        yield
    finally:
        _MESH.reset(token)


def on_mesh(function: Function) -> Function:
    """Trace a function for the mesh in the settings of its first argument."""

    @wraps(function)
    def placed(fixed: Any, *args: Any, **kwargs: Any) -> Any:
        with over(fixed.settings.mesh):
            return function(fixed, *args, **kwargs)

    return placed  # type: ignore[return-value]


def _spec(*axes: Any) -> PartitionSpec:
    return PartitionSpec(*axes)  # type: ignore[no-untyped-call]


def _constrain(tree: Tree, spec_of: Callable[[Mesh], PartitionSpec]) -> Tree:
    mesh = _MESH.get()
    if mesh is None:
        return tree
    where = NamedSharding(mesh, spec_of(mesh))
    return lax.with_sharding_constraint(tree, where)  # type: ignore[no-untyped-call]


def spread(tree: Tree) -> Tree:
    """Keep arrays whose leading axis runs over the islands on the islands' devices."""
    return _constrain(tree, lambda mesh: _spec(mesh.axis_names))


def share(tree: Tree) -> Tree:
    """Give every device the whole of small arrays."""
    return _constrain(tree, lambda mesh: _spec())


def locally(function: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to the islands of each device, as if there were no others.

    What does not fall into equal parts is not of islands, and every device has all of it.
    """
    mesh = _MESH.get()
    sizes = [leaf.shape[0] for leaf in jax.tree.leaves(arrays)]
    if mesh is None or any(size % mesh.size for size in sizes):
        return function(*arrays)
    spec = _spec(mesh.axis_names)
    # A model's loops may carry what does and what does not vary from device to device.
    apart = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return apart(*arrays)


def place(mesh: Mesh | None, tree: Tree) -> Tree:
    """Put the same arrays on every device of a mesh, also on those of other processes."""
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, _spec())

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer):
            return leaf
        if is_key(leaf):
            data = jax.device_put(np.asarray(random.key_data(leaf)), everywhere)
            return random.wrap_key_data(data, impl=random.key_impl(leaf))
        return jax.device_put(np.asarray(leaf), everywhere)

    return jax.tree.map(one, tree)


def is_key(leaf: Any) -> bool:
    """Tell whether an array is of random keys, whose numbers are not to be seen."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fetch(tree: Tree) -> Tree:
    """Return arrays of this process, also of islands that another one holds.

    Then all processes must ask for them.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        if is_key(leaf):
            data = one(random.key_data(leaf))
            return random.wrap_key_data(data, impl=random.key_impl(leaf))
        if leaf.is_fully_replicated:
            return np.asarray(leaf.addressable_data(0))
        return process_allgather(leaf, tiled=True)

    return jax.tree.map(one, tree)


def spans_processes(mesh: Mesh | None) -> bool:
    """Tell whether other processes hold some of a mesh's devices."""
    return mesh is not None and mesh.is_multi_process
