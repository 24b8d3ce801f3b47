"""The shape of each component's posterior, from the other islands' particles."""

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.engine import linalg
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.loo import loo_covariance, loo_sum, loo_variance
from numpyro_jala.engine.partition import Partition

#: A regression on the positions needs this many particles for each coordinate.
_DRAWS_PER_DIM = 2
_TINY = 1e-20
#: Scales that fall to less than this share within a few moves are those of copies.
_COLLAPSED = 1e-3
_RIDGE = 1e-6


def can_regress(weight: Array, dim: np.ndarray) -> np.ndarray:
    """Tell for which dimensions the other islands have particles enough to regress."""
    num_islands, _, num_particles = weight.shape
    return np.asarray((num_islands - 1) * num_particles >= _DRAWS_PER_DIM * dim)


def _diagonal(matrix: Array) -> Array:
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def _scales(covariance: Array) -> Array:
    """Return standard deviations as columns."""
    return jnp.sqrt(jnp.maximum(_diagonal(covariance), _TINY))[..., None]


def _eye(matrix: Array) -> Array:
    return jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


def _transpose(matrix: Array) -> Array:
    return jnp.swapaxes(matrix, -1, -2)


def regress(covariance: Array, cross: Array) -> Array:
    """Return the slopes of some columns on others, given covariances.

    Parameters
    ----------
    covariance
        Of the columns that explain, (..., dim, dim).
    cross
        Between these and the columns to explain, (..., dim, columns).
    """
    scale = _scales(covariance)
    correlation = covariance / (scale * _transpose(scale))
    ridge = _RIDGE * _eye(covariance)
    return linalg.solve_positive(correlation + ridge, cross / scale) / scale


def fill(matrix: Array, padding: np.ndarray | Array) -> Array:
    """Take padding for coordinates of variance one that are independent of the others."""
    return matrix + padding[..., None] * _eye(matrix)


def _num_real(padding: np.ndarray) -> np.ndarray:
    """Count the coordinates of each component."""
    return np.asarray(padding.shape[-1] - padding.sum(-1))


def shrunk_factor(covariance: Array, num_draws: Array, padding: np.ndarray) -> Array:
    """Return a Cholesky factor of a covariance shrunk towards its diagonal.

    Correlations lose the share of their sum of squares that is noise (Schäfer and
    Strimmer 2005): what is clearly correlated stays so, and a cloud of independent
    coordinates is seen as one, however few the draws. Padding does not count.
    """
    dim = _num_real(padding)
    scale = _scales(covariance)
    correlation = covariance / (scale * _transpose(scale))
    noise = jnp.asarray(dim * (dim - 1)) / jnp.maximum(num_draws, 1.0)
    matrix = _shrink(correlation, noise) + _RIDGE * _eye(covariance)
    return scale * linalg.cholesky(matrix)


def _shrink(matrix: Array, noise: Array) -> Array:
    """Shrink what is off the diagonal, whose sum of squares holds some noise."""
    diagonal = jnp.where(_eye(matrix) > 0, matrix, 0.0)
    apart = matrix - diagonal
    share = noise / jnp.maximum(jnp.sum(apart**2, (-2, -1)), 1e-30)
    return diagonal + (1 - jnp.minimum(share, 1.0))[..., None, None] * apart


def curvature_factor(
    covariance: Array,
    cross: Array,
    gradient_variance: Array,
    num_draws: Array,
    padding: np.ndarray,
) -> Array:
    """Return a lower factor of the inverse of the mean curvature.

    The curvature is the slope of a regression of the gradients on the positions. For a
    Gaussian that has no noise, where a covariance of as few draws would have much. What
    noise there is, by the residuals, is shrunk away. Where the curvature is not positive
    there is no factor, and the result not finite.

    Parameters
    ----------
    covariance
        Of the positions, (islands, components, dim, dim).
    cross
        Covariance of positions (rows) and gradients (columns), likewise.
    gradient_variance
        (islands, components, dim)
    num_draws
        (islands, components)
    padding
        One where a coordinate is padding, (components, dim).
    """
    size, real = covariance.shape[-1], 1 - padding
    scale, eye = _scales(covariance), _eye(covariance)
    cross = cross * _transpose(scale) / scale
    right = jnp.concatenate([cross, jnp.broadcast_to(eye, cross.shape)], -1)
    correlation = covariance / (scale * _transpose(scale))
    solved = regress(correlation, right)
    slope, inverse = solved[..., :size], solved[..., size:]
    residual = gradient_variance * scale[..., 0] ** 2 - jnp.sum(cross * slope, -2)
    variance = _diagonal(inverse)[..., None] * jnp.maximum(residual, 0.0)[..., None, :]
    variance = variance * (real[..., None] * real[..., None, :])
    num_spare = jnp.maximum(num_draws - _num_real(padding), 1.0)
    variance = variance / num_spare[..., None, None]
    # The mean of a slope and its transpose has half the noise.
    total = variance.sum((-2, -1)) - jnp.trace(variance, axis1=-2, axis2=-1)
    curvature = _shrink((slope + _transpose(slope)) / 2, total / 2)
    # A factor of the flipped matrix is an upper one of the matrix, and the inverse of
    # its transpose a lower one of the inverse.
    flipped = linalg.cholesky(curvature[..., ::-1, ::-1])
    inverted = linalg.solve_lower(flipped, jnp.broadcast_to(eye, flipped.shape))
    return scale * _transpose(inverted[..., ::-1, ::-1])


def _dense_factor(
    weight: Array, position: Array, gradient: Array, padding: np.ndarray
) -> Array:
    squares = jnp.sum(weight**2, -1)
    num_draws = loo_sum(
        jnp.where(squares > 0, 1 / jnp.where(squares > 0, squares, 1.0), 0.0)
    )
    covariance = fill(loo_covariance(weight, position, position), padding)
    plain = shrunk_factor(covariance, num_draws, padding)
    enough = can_regress(weight, _num_real(padding))
    if not enough.any():
        return plain
    gradient = jnp.where(weight[..., None] > 0, gradient, 0.0)
    cross = fill(loo_covariance(weight, position, gradient), padding)
    spread = loo_variance(weight, gradient) + padding
    factor = curvature_factor(covariance, cross, spread, num_draws, padding)
    found = jnp.isfinite(factor).all((-2, -1)) & enough
    return jnp.where(found[..., None, None], factor, plain)


def loo_factor(
    weight: Array, position: Array, gradient: Array, partition: Partition, most_dense: int
) -> Factor:
    """Return a factor of each component's covariance, as the other islands see it.

    Parameters
    ----------
    weight
        (islands, components, particles)
    position, gradient
        (islands, particles, dim)
    most_dense
        Size of the largest component whose correlations are learned.
    """
    blocks = []
    parts = zip(
        partition.of_block(weight),
        partition.split(position),
        partition.split(gradient),
        partition.padding,
        strict=True,
    )
    for own_weight, x, g, padding in parts:
        if x.shape[-1] <= most_dense:
            blocks.append(_dense_factor(own_weight, x, g, padding))
        else:
            variance = jnp.maximum(loo_variance(own_weight, x), _TINY)
            blocks.append(jnp.sqrt(variance))
    return Factor(tuple(blocks))


def is_collapsed(block: Array, last: Array) -> Array:
    """Tell for which islands and components a block of a factor is no use.

    Few particles may all descend from one for a while. Their spread then says nothing.
    The result broadcasts against the block.
    """
    dense = block.ndim == 4
    scale, last_scale = (_diagonal(f) if dense else f for f in (block, last))
    finite = jnp.isfinite(block).all((-2, -1) if dense else -1)
    lost = (scale < _COLLAPSED * last_scale).any(-1) | ~finite
    return lost[..., None, None] if dense else lost[..., None]
