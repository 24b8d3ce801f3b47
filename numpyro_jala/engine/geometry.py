"""The shape of a posterior, as the other islands see it."""

import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve, solve_triangular

from numpyro_jala._typing import Array
from numpyro_jala.engine.adaptation import (
    by_island,
    loo_covariance,
    loo_sum,
    loo_variance,
)

#: A regression on the positions needs this many particles for each coordinate.
_DRAWS_PER_DIM = 2
_TINY = 1e-20
#: Scales that fall to less than this share within a few moves are those of copies.
_COLLAPSED = 1e-3


def can_regress(weight: Array, dim: int) -> bool:
    """Tell whether the other islands have particles enough for a regression."""
    num_islands, num_particles = weight.shape
    return (num_islands - 1) * num_particles >= _DRAWS_PER_DIM * dim


def regress(covariance: Array, cross: Array) -> Array:
    """Return the slopes of some columns on others, given covariances.

    Parameters
    ----------
    covariance
        Of the columns that explain, (dim, dim).
    cross
        Between these and the columns to explain, (dim, columns).
    """
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), _TINY))[:, None]
    ridge = 1e-6 * jnp.eye(scale.size, dtype=scale.dtype)
    factor = cho_factor(covariance / (scale * scale.T) + ridge)
    return cho_solve(factor, cross / scale) / scale


def shrunk_factor(covariance: Array, num_draws: Array) -> Array:
    """Return a Cholesky factor of a covariance shrunk towards its diagonal.

    Correlations lose the share of their sum of squares that is noise (Schäfer and
    Strimmer 2005): what is clearly correlated stays so, and a cloud of independent
    coordinates is seen as one, however few the draws.
    """
    dim = covariance.shape[-1]
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), _TINY))[:, None]
    correlation = covariance / (scale * scale.T)
    noise = dim * (dim - 1) / jnp.maximum(num_draws, 1.0)
    matrix = _shrink(correlation, noise) + 1e-6 * jnp.eye(dim, dtype=scale.dtype)
    return scale * jnp.linalg.cholesky(matrix)


def _shrink(matrix: Array, noise: Array) -> Array:
    """Shrink what is off the diagonal, whose sum of squares holds some noise."""
    diagonal = jnp.diag(jnp.diagonal(matrix))
    apart = matrix - diagonal
    share = noise / jnp.maximum(jnp.sum(apart**2), 1e-30)
    return diagonal + (1 - jnp.minimum(share, 1.0)) * apart


def curvature_factor(
    covariance: Array, cross: Array, gradient_variance: Array, num_draws: Array
) -> Array:
    """Return a lower factor of the inverse of the mean curvature.

    The curvature is the slope of a regression of the gradients on the positions. For a
    Gaussian that has no noise, where a covariance of as few draws would have much. What
    noise there is, by the residuals, is shrunk away. Where the curvature is not positive
    there is no factor, and the result not finite.

    Parameters
    ----------
    covariance
        Of the positions, (dim, dim).
    cross
        Covariance of positions (rows) and gradients (columns), (dim, dim).
    gradient_variance
        (dim,)
    """
    dim = covariance.shape[-1]
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance), _TINY))[:, None]
    eye = jnp.eye(dim, dtype=scale.dtype)
    cross = cross * scale.T / scale
    right = jnp.concatenate([cross, eye], 1)
    solved = regress(covariance / (scale * scale.T), right)
    slope, inverse = solved[:, :dim], solved[:, dim:]
    residual = gradient_variance * scale[:, 0] ** 2 - jnp.sum(cross * slope, 0)
    variance = jnp.diagonal(inverse)[:, None] * jnp.maximum(residual, 0.0)
    variance = variance / jnp.maximum(num_draws - dim, 1.0)
    # The mean of a slope and its transpose has half the noise.
    noise = (variance.sum() - jnp.trace(variance)) / 2
    curvature = _shrink((slope + slope.T) / 2, noise)
    # A factor of the flipped matrix is an upper one of the matrix, and the inverse of
    # its transpose a lower one of the inverse.
    upper = jnp.linalg.cholesky(curvature[::-1, ::-1])[::-1, ::-1]
    return scale * solve_triangular(upper, eye, lower=False).T


def loo_factor(weight: Array, position: Array, gradient: Array, dense: bool) -> Array:
    """Return a factor of each island's covariance, as the rest see it.

    A lower triangle (num_islands, dim, dim), or a diagonal (num_islands, dim).
    """
    if not dense:
        return jnp.sqrt(jnp.maximum(loo_variance(weight, position), _TINY))
    squares = jnp.sum(weight**2, -1)
    num_draws = loo_sum(
        jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1.0), 0.0)
    )
    covariance = loo_covariance(weight, position, position)
    plain = by_island(shrunk_factor, covariance, num_draws)
    if not can_regress(weight, position.shape[-1]):
        return plain
    gradient = jnp.where(weight[..., None] > 0, gradient, 0.0)
    cross = loo_covariance(weight, position, gradient)
    spread = loo_variance(weight, gradient)
    factor = by_island(curvature_factor, covariance, cross, spread, num_draws)
    found = jnp.isfinite(factor).all((1, 2), keepdims=True)
    return jnp.where(found, factor, plain)


def is_collapsed(factor: Array, last: Array) -> Array:
    """Tell for which islands a factor is no use, as the rest are copies of a particle.

    Few particles may all descend from one for a while. Their spread then says nothing.
    The result broadcasts against the factors.
    """
    dense = factor.ndim == 3
    scale, last_scale = (
        jnp.diagonal(f, axis1=1, axis2=2) if dense else f for f in (factor, last)
    )
    lost = (scale < _COLLAPSED * last_scale).any(-1) | ~jnp.isfinite(factor).all(
        (1, 2) if dense else 1
    )
    return lost[:, None, None] if dense else lost[:, None]
