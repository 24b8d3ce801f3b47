"""Learn how an island should move, from the other islands.

What is computed from the particles it then moves biases the evidence; what comes from
other particles does not. So each island uses leave-one-island-out (loo) statistics.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import ndtri

from numpyro_jala._typing import Array
from numpyro_jala.backend.sharding import locally
from numpyro_jala.engine.weights import conditional_fraction

#: Variance of the log-weights that one move at a fixed target may cause.
MOVE_VARIANCE = 0.1
#: Where a Metropolis test follows, a step may be this much longer, or has to be this much
#: shorter, as steps are long or short. At this size it is as long as others are.
_LONGER, _SHORTER, _SHORT_STEP = 2.0, 0.5, 0.004
#: Units of the last digit by which a potential may be off.
_ROUNDINGS = 4
#: In whitened coordinates a step size of one forgets a Gaussian at once.
LARGEST_STEP = 0.6
_STEP_SIZE_RATE = 0.3


def loo_sum(values: Array) -> Array:
    """Sum over the islands (leading axis) that are not this one.

    Not as a difference to the sum over all, whose rounding would carry a trace of it.
    """
    num_islands = values.shape[0]
    mask = ~jnp.eye(num_islands, dtype=bool)
    mask = mask.reshape(mask.shape + (1,) * (values.ndim - 1))
    return jnp.sum(jnp.where(mask, values, 0), axis=1)


def loo_island_mean(values: Array, alive: Array) -> Array:
    """Average over the living islands (leading axis) that are not this one."""
    living = alive.reshape(alive.shape + (1,) * (values.ndim - 1))
    count = jnp.maximum(loo_sum(living.astype(values.dtype)), 1.0)
    return loo_sum(jnp.where(living, values, 0.0)) / count


def loo_mean(weight: Array, values: Array) -> Array:
    """Return the weighted mean of columns, for each island from the rest."""
    means = jnp.einsum("jn,jnd->jd", weight, values)
    return loo_island_mean(means, weight.sum(-1) > 0)


def by_island(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Apply a function to the entries along the leading axis.

    On a CPU one after the other, for factorisations: jaxlib spreads batched ones over a
    pool of threads, where two at a time can wait for each other for ever.
    """

    def in_turn(*entries: Any) -> Any:
        return lax.map(lambda entry: fn(*entry), entries)

    def each(*entries: Any) -> Any:
        return lax.platform_dependent(*entries, cpu=in_turn, default=jax.vmap(fn))

    return locally(each, *arrays)


def _centre(weight: Array, values: Array) -> Array:
    """Subtract the cloud's mean: moments about it lose fewer digits."""
    alive = jnp.maximum(jnp.sum(weight.sum(-1) > 0), 1)
    return values - jnp.einsum("jn,jnd->d", weight, values) / alive


def loo_covariance(weight: Array, first: Array, second: Array) -> Array:
    """Return the covariance of two kinds of columns, for each island from the rest.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    first, second
        (num_islands, num_particles, columns)

    Returns
    -------
    Array
        (num_islands, columns of first, columns of second)
    """
    x, z = _centre(weight, first), _centre(weight, second)
    mean_x, mean_z = loo_mean(weight, x), loo_mean(weight, z)
    product = jnp.einsum("jnd,jne->jde", x * weight[..., None], z)
    return (
        loo_island_mean(product, weight.sum(-1) > 0)
        - mean_x[:, :, None] * mean_z[:, None, :]
    )


def loo_products(weight: Array, first: Array, second: Array) -> Array:
    """Return the covariance of each column of one kind with that of another kind."""
    x, z = _centre(weight, first), _centre(weight, second)
    mean_x, mean_z = loo_mean(weight, x), loo_mean(weight, z)
    return loo_mean(weight, x * z) - mean_x * mean_z


def loo_variance(weight: Array, values: Array) -> Array:
    """Return the variance of each column, for each island from the rest."""
    return loo_products(weight, values, values)


def gaussian_step_size(dim: int) -> float:
    """Return the step size that a Gaussian of this dimension bears."""
    return float(min(LARGEST_STEP, (2 * MOVE_VARIANCE / dim) ** (1 / 3)))


def weight_variance(weight: Array, increment: Array) -> Array:
    """Return the variance of log-weights that increments cause, for each island."""
    return -jnp.log(jnp.clip(conditional_fraction(weight, increment), 1e-3, 1.0))


def refusal_variance(weight: Array, increment: Array) -> Array:
    """Return the variance of log-ratios at which as many tests would be passed."""
    passed = jnp.sum(weight * jnp.exp(jnp.minimum(increment, 0.0)), -1)
    return 4 * ndtri(0.5 * jnp.clip(passed, 1e-6, 1.0)) ** 2


def rounding_variance(weight: Array, potential: Array) -> Array:
    """Return the variance of log-ratios that no shorter step would make smaller."""
    size = jnp.sum(weight * jnp.abs(potential), -1)
    return (_ROUNDINGS * np.finfo(potential.dtype).eps * size) ** 2


def tested_multiplier(step_size: Array) -> Array:
    """Return by how much a step is longer where a Metropolis test follows.

    A rejected particle reverses its momentum and retraces its path. So the shorter the
    step size, the fewer rejections are allowed.
    """
    return jnp.clip(jnp.sqrt(step_size / _SHORT_STEP), _SHORTER, _LONGER)


def momentum_memory(step_size: Array) -> Array:
    """Return what a step leaves of the momentum, which should last for a length of one."""
    return jnp.exp(-jnp.sqrt(2 * step_size))


def adapt_step_size(log_step_size: Array, variance: Array, allowed: Array) -> Array:
    """Move each island's log step size towards the variance that is allowed."""
    # The variance grows with the cube of the step size.
    change = jnp.log(allowed / jnp.maximum(variance, 1e-12)) / 3
    new = log_step_size + _STEP_SIZE_RATE * jnp.clip(change, -2.0, 1.0)
    return jnp.minimum(new, jnp.log(LARGEST_STEP))
