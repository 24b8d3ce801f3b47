"""Leave-one-island-out statistics.

What is computed from the particles it then moves biases the evidence; what comes from
other particles does not. So what an island needs to know is taken from the other islands.

Weights are normalised within each island and component, (islands, components, particles);
values have these axes and one of columns.
"""

from __future__ import annotations

import jax.numpy as jnp

from numpyro_jala._typing import Array


def loo_sum(values: Array) -> Array:
    """Sum over the islands (leading axis) that are not this one.

    Not as a difference to the sum over all, whose rounding would carry a trace of it.
    """
    num_islands = values.shape[0]
    mask = ~jnp.eye(num_islands, dtype=bool)
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - 1))
    return jnp.sum(jnp.where(mask, values, 0), axis=1)


def is_alive(weight: Array) -> Array:
    """Tell in which islands a component has a living particle, (islands, components)."""
    return weight.sum(-1) > 0


def loo_island_mean(values: Array, alive: Array) -> Array:
    """Average over the living islands (leading axis) that are not this one."""
    living = alive.reshape(alive.shape + (1,) * (values.ndim - alive.ndim))
    count = jnp.maximum(loo_sum(living.astype(values.dtype)), 1.0)
    return loo_sum(jnp.where(living, values, 0.0)) / count


def loo_mean(weight: Array, values: Array) -> Array:
    """Return the weighted mean of columns, (islands, components, columns)."""
    means = jnp.einsum("jcn,jcnd->jcd", weight, values)
    return loo_island_mean(means, is_alive(weight))


def _centre(weight: Array, values: Array) -> Array:
    """Subtract the mean over all islands: moments about it lose fewer digits."""
    alive = jnp.maximum(jnp.sum(is_alive(weight), 0), 1)[:, None]
    return values - (jnp.einsum("jcn,jcnd->cd", weight, values) / alive)[:, None]


def loo_covariance(weight: Array, first: Array, second: Array) -> Array:
    """Return the covariance of two kinds of columns.

    (islands, components, columns of first, columns of second)
    """
    x, z = _centre(weight, first), _centre(weight, second)
    mean_x, mean_z = loo_mean(weight, x), loo_mean(weight, z)
    product = jnp.einsum("jcnd,jcne->jcde", x * weight[..., None], z)
    mean = loo_island_mean(product, is_alive(weight))
    return mean - mean_x[..., :, None] * mean_z[..., None, :]


def loo_products(weight: Array, first: Array, second: Array) -> Array:
    """Return the covariance of each column of one kind with that of another kind."""
    x, z = _centre(weight, first), _centre(weight, second)
    mean_x, mean_z = loo_mean(weight, x), loo_mean(weight, z)
    return loo_mean(weight, x * z) - mean_x * mean_z


def loo_variance(weight: Array, values: Array) -> Array:
    """Return the variance of each column, (islands, components, columns)."""
    return loo_products(weight, values, values)
