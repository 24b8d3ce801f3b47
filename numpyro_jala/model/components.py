"""The independent components of a model's latents, and the potential of each.

A log-density is a sum of terms: each element of each site's log-probability. Latents that
share a term belong to one component. Given the params, components are independent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, Potential, Tree
from numpyro_jala.engine.partition import Partition, partition
from numpyro_jala.engine.segments import Segments
from numpyro_jala.model.dependence import find
from numpyro_jala.model.dependence.find import confirm

#: Points at which the components that were found are confirmed.
_NUM_POINTS = 3
#: Most coordinates that a term of a large component depends on, if it is to have a pattern.
_MOST_MEMBERS = 8


class Terms(NamedTuple):
    """The terms of a log-density: those of the prior, and those that are tempered."""

    prior: list[Array]
    data: list[Array]


#: ``term_fn(params, position) -> Terms``
TermFn = Callable[[Array, Array], Terms]
#: Where the terms of each component are: those of the prior, and those of the data.
Index = tuple[list[Any], list[Any]]


@dataclass(frozen=True, eq=False)
class Components:
    """How the latents of a model fall into components."""

    partition: Partition
    prior: Segments
    data: Segments

    def equals(self, other: Components) -> bool:
        """Tell whether latents and terms fall into the same components."""
        ours = (self.partition.owner, self.prior.owner, self.data.owner)
        theirs = (other.partition.owner, other.prior.owner, other.data.owner)
        return all(map(np.array_equal, ours, theirs))

    @cached_property
    def index(self) -> Index:
        """Where the terms of each component are."""
        return self.prior.index, self.data.index

    def potential(self, term_fn: TermFn, index: Index | None) -> Potential:
        """Return the potentials of the components, from the prior to the joint density.

        ``index`` is that of this object, as arguments of a program, or None.
        """
        of_prior, of_data = (None, None) if index is None else index

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            terms = term_fn(params, position)
            prior, data = _flatten(terms.prior, position), _flatten(terms.data, position)
            tempered = temperature * self.data.total(data, of_data)
            return -(self.prior.total(prior, of_prior) + tempered)

        return potential


def find_components(
    term_fn: Callable[[Tree, Array], Terms], params: Tree, anchor: Array
) -> Components | None:
    """Find the components of a model, or None if there is but one.

    What is found in the program is confirmed by derivatives. The components hold whatever
    the values of the params, which may be any tree of arrays.
    """
    noise = np.random.default_rng(0).normal(size=(_NUM_POINTS, anchor.size))
    positions = np.asarray(anchor + noise, anchor.dtype)
    try:
        found = find.find(term_fn, params, anchor)
        if found.coordinates.max(initial=0) == 0:
            return None
        if not confirm(term_fn, found, params, positions, seed=1):
            return None
    except UserWarning:  # where warnings are errors
        raise
    except Exception:  # a program that cannot be followed: one component is always right
        return None
    parts = partition(found.coordinates)
    number = np.zeros(parts.num_components, int)
    number[found.coordinates] = parts.owner
    prior, data = (
        Segments(parts.num_components, _owners(labels, number))
        for labels in (found.factors.prior, found.factors.data)
    )
    return Components(parts, prior, data)


def energy_terms(term_fn: TermFn) -> Callable[[Array, Array], Array]:
    """Return the function that gives the terms of the potential in one vector."""

    def energy(params: Array, position: Array) -> Array:
        terms = term_fn(params, position)
        return -_flatten([*terms.prior, *terms.data], position)

    return energy


def find_members(term_fn: TermFn, params: Array, anchor: Array) -> np.ndarray | None:
    """Find the coordinates of each of the :func:`energy_terms`; None if they are many."""
    try:
        return find.find_members(energy_terms(term_fn), params, anchor, _MOST_MEMBERS)
    except UserWarning:  # where warnings are errors
        raise
    except Exception:  # a program that cannot be followed
        return None


def _flatten(arrays: list[Array], like: Array) -> Array:
    """Put the entries of arrays in one vector."""
    flat = [jnp.ravel(array).astype(like.dtype) for array in arrays]
    return flat[0] if len(flat) == 1 else jnp.concatenate([like[:0], *flat])


def _owners(labels: list[np.ndarray], number: np.ndarray) -> np.ndarray:
    """Return the component of each term, of the constant ones in turn.

    A term on which no latent has an influence may be counted with any component.
    """
    flat = np.concatenate([np.zeros(0, int), *(np.ravel(each) for each in labels)])
    shared = np.arange(flat.size) % number.size
    return np.where(flat < 0, shared, number[flat])
