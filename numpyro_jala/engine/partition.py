"""Which coordinates of a position belong to which component.

Given the parameters, components are independent of each other: each has a potential, a
weight, a step size and a temperature of its own. Positions are flat vectors in the order
of the model. Components of similar size form a block, an array with a row for each of
them, padded to one length, on which linear algebra is batched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array

#: Components of up to so many latents are small. Importance sampling is then more precise
#: than a bridge by a factor of two or more, and forward mode the quicker one: reverse mode
#: turns ``u[group]`` into a scatter, which a CPU does one entry at a time.
_FEW_LATENTS = 3


@dataclass(frozen=True, eq=False)
class Partition:
    """The components of a position, in the order of the blocks.

    dim
        Coordinates of a position.
    blocks
        Coordinates of each component, (num_components, size); ``dim`` where padded.
    """

    dim: int
    blocks: tuple[np.ndarray, ...]

    @cached_property
    def num_components(self) -> int:
        """How many components there are."""
        return sum(map(len, self.blocks))

    @cached_property
    def owner(self) -> np.ndarray:
        """The component of each coordinate, (dim,)."""
        owner, first = np.zeros(self.dim + 1, int), 0
        for block in self.blocks:
            owner[block] = first + np.arange(len(block))[:, None]
            first += len(block)
        return owner[:-1]

    @cached_property
    def slot(self) -> np.ndarray:
        """The place of each coordinate within its component, (dim,)."""
        slot = np.zeros(self.dim + 1, int)
        for block in self.blocks:
            slot[block] = np.arange(block.shape[1])
        return slot[:-1]

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many coordinates each component has, (num_components,)."""
        return np.bincount(self.owner, minlength=self.num_components)

    @cached_property
    def padding(self) -> list[np.ndarray]:
        """One where a block is padded and zero elsewhere, (num_components, size)."""
        return [(block == self.dim).astype(np.float32) for block in self.blocks]

    @property
    def is_joint(self) -> bool:
        """Whether all coordinates form one component."""
        return self.num_components == 1

    @cached_property
    def is_small(self) -> np.ndarray:
        """Which components have few latents, (num_components,)."""
        return self.sizes <= _FEW_LATENTS

    @cached_property
    def has_small_components(self) -> bool:
        """Whether there are several components, all of them small."""
        return not self.is_joint and bool(self.is_small.all())

    def split(self, values: Array) -> list[Array]:
        """Part rows (..., num_rows, dim) into blocks (..., components, num_rows, size).

        Padding is zero.
        """
        if self.is_joint:
            return [values[..., None, :, :]]
        return [jnp.moveaxis(take(values, block), -2, -3) for block in self.blocks]

    def join(self, blocks: list[Array]) -> Array:
        """Put blocks (..., components, num_rows, size) together as rows, less padding."""
        if self.is_joint:
            return blocks[0][..., 0, :, :]
        flat = [_flatten(jnp.moveaxis(block, -3, -2)) for block in blocks]
        together = flat[0] if len(flat) == 1 else jnp.concatenate(flat, -1)
        return take(together, self._places)

    @cached_property
    def _places(self) -> np.ndarray:
        """Where each coordinate stands among the flattened blocks, (dim,)."""
        order = np.concatenate([block.ravel() for block in self.blocks])
        places = np.zeros(self.dim + 1, int)
        places[order] = np.arange(order.size)
        return places[:-1]

    def total(self, values: Array) -> Array:
        """Sum rows (..., num_rows, dim) over each component: (..., components, num_rows)."""
        sums = [block.sum(-1) for block in self.split(values)]
        return sums[0] if len(sums) == 1 else jnp.concatenate(sums, -2)

    def spread(self, values: Array) -> Array:
        """Give each coordinate the value of its component: (..., components) to (..., dim).

        Of one component it stays an axis of one, for broadcasting.
        """
        return values if self.is_joint else take(values, self.owner)

    def of_block(self, values: Array) -> list[Array]:
        """Part (num_islands, components, ...) into the blocks' components."""
        ends = np.cumsum([len(block) for block in self.blocks])[:-1]
        return [values] if len(self.blocks) == 1 else jnp.split(values, ends, 1)


def joint(dim: int) -> Partition:
    """Take all coordinates as one component."""
    return Partition(dim, (np.arange(dim)[None],))


def partition(labels: np.ndarray) -> Partition:
    """Form blocks of components, given the component of each coordinate.

    Lengths are rounded up to powers of four: each block is compiled by itself, and padding
    costs less than the compilation of twice as many.
    """
    labels = np.unique(labels, return_inverse=True)[1]
    dim = labels.size
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    starts = np.cumsum(sizes) - sizes
    lengths = np.ceil(np.log2(sizes) / 2).astype(int)
    blocks, members = [], [np.flatnonzero(lengths == k) for k in np.unique(lengths)]
    for each in members:
        column = np.arange(int(sizes[each].max()))
        index = np.minimum(starts[each, None] + column, dim - 1)
        blocks.append(np.where(column < sizes[each, None], order[index], dim))
    return Partition(dim, tuple(blocks))


def _flatten(values: Array) -> Array:
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


def take(values: Array, index: np.ndarray, placed: Array | None = None) -> Array:
    """Take entries of the last axis; those past its end are zero.

    Parameters
    ----------
    placed
        The index as an argument of the program that this is part of. As a constant a long
        one is compiled, and kept, with every program.
    """
    size = values.shape[-1]
    if np.array_equal(index.ravel(), np.arange(size)):
        return values.reshape(*values.shape[:-1], *index.shape)
    where = jnp.asarray(index) if placed is None else placed
    taken = jnp.take(values, where, axis=-1, mode="clip")
    return taken if index.max(initial=0) < size else jnp.where(where < size, taken, 0)
