"""Sums over segments whose derivative is not a scatter.

A sum of terms by component reads each term once, and its transpose reads the sum of each
term's component. JAX would turn the former's reads into writes, a scatter, which a CPU
does one entry at a time and which takes long to compile. Here each is the other's
transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from numpyro_jala._typing import Array
from numpyro_jala.backend import innermost
from numpyro_jala.engine.partition import partition, take


@dataclass(frozen=True, eq=False)
class Segments:
    """Which segment each entry belongs to.

    owner
        The segment of each entry, (num_entries,).
    """

    num_segments: int
    owner: np.ndarray

    @cached_property
    def tables(self) -> tuple[list[np.ndarray], np.ndarray]:
        """The entries of segments of similar length, and where each segment's sum is.

        Padded to the longest, so that sums run over rows of a table.
        """
        rows = partition(self.owner)
        firsts = np.concatenate([self.owner[block[:, 0]] for block in rows.blocks])
        places = np.full(self.num_segments, firsts.size)  # past the end: an empty segment
        places[firsts] = np.arange(firsts.size)
        return list(rows.blocks), places

    @cached_property
    def index(self) -> list[np.ndarray]:
        """What sums and their transposes read, as arguments of a program."""
        tables, places = self.tables if self.owner.size else ([], self.owner)
        return [self.owner, places, *tables]

    def total(self, entries: Array, index: Sequence[Any] | None = None) -> Array:
        """Sum the last axis over each segment; ``index`` is that of this object."""
        if not self.owner.size:
            return jnp.zeros((*entries.shape[:-1], self.num_segments), entries.dtype)
        index = self.index if index is None else index
        return _total_p.bind(entries, *index, segments=self)  # type: ignore[no-untyped-call]

    def spread(self, sums: Array) -> Array:
        """Give each entry on the last axis the value of its segment."""
        return _spread_p.bind(sums, *self.index, segments=self)  # type: ignore[no-untyped-call]


def _total(entries: Array, *index: Array, segments: Segments) -> Array:
    tables, places = segments.tables
    # Else a compiler for GPUs computes each entry where it is read, in any order.
    entries = lax.optimization_barrier(entries)  # type: ignore[no-untyped-call]
    sums = [
        take(entries, table, placed).sum(-1)
        for table, placed in zip(tables, index[2:], strict=True)
    ]
    together = sums[0] if len(sums) == 1 else jnp.concatenate(sums, -1)
    return take(together, places, index[1])


def _spread(sums: Array, *index: Array, segments: Segments) -> Array:
    return take(sums, segments.owner, index[0])


_total_p, _spread_p = Primitive("segment_total"), Primitive("segment_spread")


def _define(primitive: Any, transpose: Any, function: Any, size_of: Any) -> None:
    """Tell JAX how to run, transpose and batch a linear function of the last axis.

    An index, which may be an argument of the program, has no derivative and no batches.
    """

    def shape(x: Any, *_: Any, segments: Segments) -> ShapedArray:
        return ShapedArray((*x.shape[:-1], size_of(segments)), x.dtype)

    def push(primals: Any, tangents: Any, *, segments: Segments) -> tuple[Any, Any]:
        tangent = ad.instantiate_zeros(tangents[0])  # type: ignore[no-untyped-call]
        return (
            primitive.bind(*primals, segments=segments),
            primitive.bind(tangent, *primals[1:], segments=segments),
        )

    def pull(cotangent: Any, _: Any, *index: Any, segments: Segments) -> list[Any]:
        if isinstance(cotangent, ad.Zero):
            return [None] * (1 + len(index))
        pulled = transpose.bind(cotangent, *index, segments=segments)
        return [pulled, *(None for _ in index)]

    def batch(args: Any, dims: Any, *, segments: Segments) -> tuple[Any, int]:
        moved = jnp.moveaxis(args[0], dims[0], 0)
        return primitive.bind(moved, *args[1:], segments=segments), 0

    innermost.RULES[primitive.name] = innermost.rule_of(function)
    primitive.def_impl(function)
    primitive.def_abstract_eval(shape)
    ad.primitive_jvps[primitive] = push
    ad.primitive_transposes[primitive] = pull
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))


_define(_total_p, _spread_p, _total, lambda segments: segments.num_segments)
_define(_spread_p, _total_p, _spread, lambda segments: segments.owner.size)
innermost.SUMS.add(_total_p.name)
