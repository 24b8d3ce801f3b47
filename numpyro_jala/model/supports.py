"""Params and latents on the real line, where they move."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to, constraints

from numpyro_jala._typing import Array, Tree
from numpyro_jala.model.sites import Site

#: Most entries of a constrained param that are looked at one by one.
_MOST_INSPECTED = 64
#: Share of its first value below which a scale has fallen to zero.
_FALLEN = 1e-3
#: Where the entries of a value lie that several unconstrained parameters move.
_RANGES = (
    (constraints.simplex, 0.0, 1.0),
    (constraints.corr_cholesky, -1.0, 1.0),
    (constraints.corr_matrix, -1.0, 1.0),
    (constraints.positive_ordered_vector, 0.0, np.inf),
)


def to_support(values: dict[str, Tree], supports: dict[str, Any]) -> dict[str, Tree]:
    """Map each param's value, a tree, from the real line to its support."""
    return {
        name: jax.tree.map(biject_to(supports[name]), value)
        for name, value in values.items()
    }


def from_support(values: dict[str, Tree], supports: dict[str, Any]) -> dict[str, Tree]:
    """Map each param's value, a tree, to the real line."""
    return {
        name: jax.tree.map(biject_to(supports[name]).inv, value)
        for name, value in values.items()
    }


def log_det_shares(site: Site, free: Array) -> Array:
    """Share the log-Jacobian of a latent's transform among its unconstrained entries.

    That of a draw whose entries are transformed together is shared equally.
    """
    transform = biject_to(site["fn"].support)
    log_det = transform.log_abs_det_jacobian(free, transform(free))
    inner = jnp.ndim(free) - jnp.ndim(log_det)
    size = math.prod(jnp.shape(free)[jnp.ndim(log_det) :])
    spread = log_det.reshape(*jnp.shape(log_det), *(1,) * inner) / max(size, 1)
    return jnp.broadcast_to(spread, jnp.shape(free))


def _is_linear(support: Any, leaf: Array) -> np.ndarray:
    """Tell in which unconstrained entries a value of a support is linear."""
    shape, size = jnp.shape(leaf), int(np.prod(jnp.shape(leaf)))
    if support is constraints.real or size > _MOST_INSPECTED:
        return np.full(shape, support is constraints.real)
    transform = biject_to(support)

    def bend(direction: np.ndarray) -> Array:
        def slope(x: Array) -> Array:
            return jax.jvp(transform, (x,), (jnp.asarray(direction),))[1]

        place = jnp.full(shape, 0.3)
        return jax.jvp(slope, (place,), (jnp.asarray(direction),))[1]

    directions = np.eye(size).reshape(size, *shape)
    with jax.ensure_compile_time_eval():
        bends = [float(jnp.max(jnp.abs(bend(each)))) for each in directions]
    return np.reshape(bends, shape) == 0


def free_coordinates(values: dict[str, Tree], supports: dict[str, Any]) -> np.ndarray:
    """Tell which coordinates a param is linear in, and which are logarithms or such.

    Parameters
    ----------
    values
        Unconstrained values of the params.
    supports
        Their constraints.

    Returns
    -------
    Array
        (num_params,), in the order of the flat vector.
    """
    found = {
        name: jax.tree.map(lambda leaf, n=name: _is_linear(supports[n], leaf), value)
        for name, value in values.items()
    }
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(found)]
    return np.concatenate([np.zeros(0, bool), *leaves])


def entry_range(support: Any) -> tuple[float, float]:
    """Return the least and the largest value that an entry of a param can have."""
    support = getattr(support, "base_constraint", support)
    for known, low, high in _RANGES:
        if isinstance(support, type(known)):
            return low, high
    return -np.inf, np.inf


def find_fallen(
    first: dict[str, Tree], last: dict[str, Tree], supports: dict[str, Any]
) -> tuple[str, float] | None:
    """Return the positive param that has fallen towards zero the furthest, and its value."""

    def lowest(name: str) -> tuple[float, str, float]:
        start, now = (
            np.asarray(ravel_pytree(each[name])[0], float) for each in (first, last)
        )
        return float(np.min(now / start)), name, float(np.min(now))

    scales = [name for name, each in supports.items() if each is constraints.positive]
    share, name, value = min(map(lowest, scales), default=(1.0, "", 0.0))
    return (name, value) if share < _FALLEN else None


def flatten(tree: Tree) -> tuple[Array, Callable[[Array], Tree]]:
    """Flatten to the precision in use, whatever that of the leaves.

    A loop carries one type, and would be compiled twice for numbers that Python gave.
    """
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, float), tree))
    return jnp.asarray(flat, float), unravel
