"""Particles block by block, each small enough for a cache.

Evaluated at all particles at once, a model writes arrays of particles times data to the
memory and reads them back. Block by block they stay in a processor's cache, which is
quicker, and the memory that a step takes does not grow with the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala._typing import Array, Tree

#: Bytes for each core of an array of one block, and of one that does without blocks.
_BLOCK, _FITS = 2**19, 2**22
#: Particles of which fewer fill a block gain nothing by it: each has work enough of its own.
_FEWEST = 32
#: Each turn of these pays its overhead anew in every block.
LOOPS = ("scan", "while")
_PRODUCT = "dot_general"


def widest(jaxpr: Any) -> int:
    """Return the bytes of the largest array that a program makes of its arguments.

    What it makes of its constants does not count: particles share it. Zero for a program
    that does not gain by blocks: one with a loop of its own, or one that multiplies no
    matrices, which the compiler weaves into one pass over the particles anyway.
    """
    found = _look(jaxpr, [True] * len(jaxpr.invars))
    return 0 if found.loops or not found.multiplies else found.widest


class _Found(NamedTuple):
    """What a program does with arguments that vary from particle to particle."""

    widest: int
    loops: bool
    multiplies: bool


def _look(jaxpr: Any, varied: list[bool]) -> _Found:
    varies = {var for var, flag in zip(jaxpr.invars, varied, strict=True) if flag}
    found = _Found(0, False, False)
    for equation in jaxpr.eqns:
        flags = [not hasattr(v, "val") and v in varies for v in equation.invars]
        if not any(flags):
            continue
        varies.update(equation.outvars)
        name = equation.primitive.name
        sizes = [num_bytes(var.aval) for var in equation.outvars]
        parts = [found, _Found(max(sizes, default=0), name in LOOPS, name == _PRODUCT)]
        for inner in inner_programs(equation):
            same = len(inner.invars) == len(flags)
            parts.append(_look(inner, flags if same else [True] * len(inner.invars)))
        found = _Found(*(max(column) for column in zip(*parts, strict=True)))
    return found


def inner_programs(equation: Any) -> list[Any]:
    """Return the programs within an equation, as in a loop or a call."""
    leaves = jax.tree.leaves(equation.params)
    programs = (getattr(leaf, "jaxpr", leaf) for leaf in leaves)
    return [program for program in programs if hasattr(program, "eqns")]


def num_bytes(aval: Any) -> int:
    """Return how much memory an array of a program takes."""
    return int(np.prod(aval.shape)) * getattr(aval.dtype, "itemsize", 0)


def num_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def num_particles(width: int, num_islands: int, size: int) -> int | None:
    """Return how many particles of each island make a block, None for all of them.

    Only on a CPU: a GPU does the more at once the better.

    Parameters
    ----------
    width
        Bytes of the largest array that the model makes of a particle, or zero.
    num_islands, size
        Islands on a device, and the particles of each.
    """
    if jax.default_backend() != "cpu":
        return None
    cores = num_cores()
    if width * num_islands * size <= _FITS * cores:
        return None
    together = _BLOCK * cores // width
    return max(together // num_islands, 1) if together >= _FEWEST else None


def _split(rows: Array, most: int, fill: str = "edge") -> Array:
    """Return blocks of equal size; the last is filled up with copies of its last row."""
    num_islands, num_rows, *rest = rows.shape
    count = -(-num_rows // most)
    size = -(-num_rows // count)
    padding = [(0, 0), (0, count * size - num_rows), *[(0, 0)] * len(rest)]
    padded = jnp.pad(rows, padding, mode=fill)
    return jnp.moveaxis(padded.reshape(num_islands, count, size, *rest), 1, 0)


def over(function: Callable[..., Tree], most: int | None, *rows: Array) -> Tree:
    """Apply a function to arrays (num_islands, num_particles, ...), block by block."""
    num_rows = rows[0].shape[1]
    if most is None or num_rows <= most:
        return function(*rows)

    def join(blocks: Array) -> Array:
        count, num_islands, size, *rest = blocks.shape
        joined = jnp.moveaxis(blocks, 0, 1).reshape(num_islands, count * size, *rest)
        return joined[:, :num_rows]

    blocks = tuple(_split(each, most) for each in rows)
    return jax.tree.map(join, lax.map(lambda block: function(*block), blocks))


def total(
    function: Callable[..., Array], most: int | None, weight: Array, *rows: Array
) -> Array:
    """Add up over blocks a function ``function(weight, *rows)`` linear in the weights."""
    if most is None or weight.shape[1] <= most:
        return function(weight, *rows)
    # Copies that fill a block up weigh nothing.
    blocks = (_split(weight, most, "constant"), *(_split(each, most) for each in rows))
    parts: Array = lax.map(lambda block: function(*block), blocks)
    return parts.sum(0)
