"""A factor of each component's covariance, whatever its shape.

Lower triangles for small components, a diagonal for large ones, or a multiple of the
identity. The rest of the engine applies it, solves with it and asks for its determinant.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine import linalg
from numpyro_jala.engine.partition import Partition


class Factor(NamedTuple):
    """A factor L of the covariance L Lᵀ, block by block.

    A block is (num_islands, components, size, size) if it is dense, or
    (num_islands, components, size) if it is diagonal. Without blocks the factor is the
    identity.
    """

    blocks: tuple[Array, ...]


IDENTITY = Factor(())


def _is_dense(block: Array, rows: Array) -> bool:
    return block.ndim > rows.ndim


def apply(factor: Factor, partition: Partition, rows: Array) -> Array:
    """Return L v for rows v (num_islands, num_rows, dim), or those of one island."""
    if not factor.blocks:
        return rows
    parts = [
        linalg.multiply(block, part)
        if _is_dense(block, rows)
        else part * block[..., None, :]
        for block, part in zip(factor.blocks, partition.split(rows), strict=True)
    ]
    return partition.join(parts)


def apply_transposed(factor: Factor, partition: Partition, rows: Array) -> Array:
    """Return Lᵀ g for rows g (num_islands, num_rows, dim)."""
    flipped = [
        jnp.swapaxes(block, -1, -2) if _is_dense(block, rows) else block
        for block in factor.blocks
    ]
    return apply(Factor(tuple(flipped)), partition, rows)


def solve(factor: Factor, partition: Partition, rows: Array) -> Array:
    """Return L⁻¹ x for rows x (num_islands, num_rows, dim)."""
    parts = []
    for block, part in zip(factor.blocks, partition.split(rows), strict=True):
        if _is_dense(block, rows):
            columns = jnp.swapaxes(part, -1, -2)
            part = jnp.swapaxes(linalg.solve_lower(block, columns), -1, -2)
        else:
            part = part / block[..., None, :]
        parts.append(part)
    return partition.join(parts)


def log_determinant(factor: Factor, partition: Partition) -> Array:
    """Return log det L of each component, (num_islands, components)."""
    sums = []
    for block, index in zip(factor.blocks, partition.blocks, strict=True):
        dense = block.ndim == 4
        diagonal = jnp.diagonal(block, axis1=-2, axis2=-1) if dense else block
        real = jnp.asarray(index < partition.dim)
        sums.append(jnp.sum(jnp.where(real, jnp.log(diagonal), 0.0), -1))
    return jnp.concatenate(sums, 1)
