"""Names for the shapes of arrays and functions."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.typing.ArrayLike
Tree: TypeAlias = Any

#: ``resample(rng_key, log_weight) -> ancestors``, for one island, ancestors sorted.
Resampler: TypeAlias = Callable[[PRNGKey, Array], Array]


class Potential(Protocol):
    """The negative log-densities of one particle's components, on a path of targets.

    The path runs from a reference of known mass at temperature 0 to the joint density
    of data and latents at temperature 1. Each component has its own temperature.
    """

    def __call__(self, params: Array, temperature: Array, position: Array) -> Array:
        """Return the potentials (components,) of one ``position`` (dim,)."""
