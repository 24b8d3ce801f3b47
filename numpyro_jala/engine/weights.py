"""Algebra of log-weights. The last axis runs over the particles of one island.

Axes before it run over islands and their components.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_jala._typing import Array
from numpyro_jala.backend.columns import over_columns


@jax.jit
def log_mean_exp(log_weight: Array) -> Array:
    """Return the logarithm of the mean weight.

    >>> print(f"{jnp.exp(log_mean_exp(jnp.log(jnp.array([1.0, 2.0, 6.0])))):.3f}")
    3.000
    """
    return logsumexp(log_weight, axis=-1) - jnp.log(log_weight.shape[-1])


@jax.jit
def normalise(log_weight: Array) -> Array:
    """Return weights that sum to one, or all zero where no particle is alive."""
    top = jnp.max(log_weight, axis=-1, keepdims=True)
    weight = jnp.exp(log_weight - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weight.sum(-1, keepdims=True)
    return weight / jnp.where(total > 0, total, 1.0)


@jax.jit
def effective_fraction(log_weight: Array) -> Array:
    r"""Return the effective sample size as a fraction of the particles.

    With normalised weights :math:`w_i` of :math:`n` particles this is
    :math:`1 / (n \sum_i w_i^2)`: one for equal weights, :math:`1/n` if one particle holds
    all the weight, and zero if none is alive.

    >>> print(effective_fraction(jnp.array([[0.0, 0.0], [0.0, -jnp.inf]])))
    [1.  0.5]
    """
    squares = jnp.sum(normalise(log_weight) ** 2, axis=-1)
    n = log_weight.shape[-1]
    return jnp.where(squares > 0, 1 / (n * jnp.where(squares > 0, squares, 1.0)), 0.0)


def conditional_fraction(weight: Array, log_increment: Array) -> Array:
    r"""Return how much of the effective sample size an increment of the weights leaves.

    With normalised weights :math:`w_i` and increments :math:`G_i` this is
    :math:`(\sum_i w_i G_i)^2 / \sum_i w_i G_i^2`, between zero and one.
    """
    top = jnp.max(jnp.where(weight > 0, log_increment, -jnp.inf), -1, keepdims=True)
    increment = jnp.exp(log_increment - jnp.where(jnp.isfinite(top), top, 0.0))
    increment = jnp.where(weight > 0, increment, 0.0)
    first = jnp.sum(weight * increment, -1) ** 2
    second = jnp.sum(weight * increment**2, -1)
    return jnp.where(second > 0, first / jnp.where(second > 0, second, 1.0), 0.0)


def pool(weight: Array) -> Array:
    """Return weights of the whole cloud that give each living island an equal share.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, components, num_particles).
    """
    alive = jnp.sum(weight.sum(-1) > 0, 0)
    return weight / jnp.maximum(alive, 1)[:, None]


def potential_scale_reduction(weight: np.ndarray, values: Array) -> float:
    """Return the largest r-hat of the columns, islands taken as chains.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    values
        (num_islands, num_particles, columns)
    """
    alive = weight.sum(1) > 0
    if alive.sum() < 2:
        return 1.0
    weight = weight[alive]

    def ratio(part: np.ndarray) -> np.ndarray:
        part = part[alive].astype(np.float64)  # in which squares do not overflow
        mean = np.einsum("jn,jnd->jd", weight, part)
        within = np.einsum("jn,jnd->jd", weight, (part - mean[:, None]) ** 2).mean(0)
        found: np.ndarray = mean.var(0, ddof=1) / np.maximum(within, 1e-30)
        return found

    ratios = over_columns(ratio, np.asarray(values))
    return float(np.sqrt(1 + ratios.max(initial=0.0)))
