r"""A mixture of Student t's that covers what other particles have found.

Langevin moves do not cross from one mode to another. A proposal from all modes at once does,
and importance sampling from it weighs them anew. Every group of particles, of an island or
more, fits a few clusters to itself, and its proposal is the mixture of the clusters of the
*other* groups:

.. math::

    q_j(x) = \frac1{J - 1} \sum_{i \ne j} \sum_k s_{ik}\, t_4(x;\, m_{ik}, L_{ik}),

so that nothing is learned from the particles that it moves. What groups tell each other are
shares, means and factors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp, ndtri

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.sharding import share
from numpyro_jala.engine import linalg, student
from numpyro_jala.engine.partition import Partition

#: A component of more latents than this has no mixture: hardly a proposal from it would be
#: accepted.
MOST_LATENTS = 12
_EM_STEPS = 8
_RIDGE, _TINY, _FAR = 1e-6, 1e-30, 1e30
#: Fractions of multiples of these are evenly spread.
_GOLDEN, _ROOT = 0.618034, 0.414214


def serves(partition: Partition) -> bool:
    """Tell whether proposals from a mixture are worth their while."""
    return partition.is_joint and 0 < partition.dim <= MOST_LATENTS


class Mixture(NamedTuple):
    """Clusters of each group's particles."""

    log_share: Array  # (groups, clusters), summing to one, or -inf in a dead group
    mean: Array  # (groups, clusters, dim)
    factor: Array  # (groups, clusters, dim, dim), lower


def _seeds(weight: Array, rows: Array, num_clusters: int) -> Array:
    """Choose rows that lie apart, (groups, clusters, dim).

    As k-means++ does, with probabilities as the squared distance to the nearest one so
    far, but by numbers that are evenly spread over the particles instead of random ones.
    """
    count = jnp.arange(1, weight.shape[1] + 1, dtype=weight.dtype)

    def choose(k: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seeds, nearest = carry
        uniform = (_GOLDEN * count + _ROOT * k) % 1.0
        gumbel = -jnp.log(-jnp.log(jnp.clip(uniform, 1e-6, 1 - 1e-6)))
        chosen = jnp.argmax(jnp.log(weight * nearest) + gumbel, -1)
        seed = jnp.take_along_axis(rows, chosen[:, None, None], 1)
        nearest = jnp.minimum(nearest, jnp.sum((rows - seed) ** 2, -1))
        return lax.dynamic_update_slice(seeds, seed, (0, k, 0)), nearest

    start = jnp.zeros((len(rows), num_clusters, rows.shape[-1]), rows.dtype)
    far = jnp.full_like(weight, _FAR)
    return lax.fori_loop(0, num_clusters, choose, (start, far))[0]


def _inverse(factor: Array) -> Array:
    eye = jnp.eye(factor.shape[-1], dtype=factor.dtype)
    return linalg.solve_lower(factor, jnp.broadcast_to(eye, factor.shape))


def _log_determinant(factor: Array) -> Array:
    return jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)).sum(-1)[..., None]


def _squares(mean: Array, inverse: Array, rows: Array) -> Array:
    """Whiten rows by each cluster; return their squared lengths (..., clusters, rows)."""
    centred = rows[..., None, :, :] - mean[..., None, :]
    noise = jnp.einsum("...kde,...kne->...knd", inverse, centred)
    return jnp.sum(noise**2, -1)


def fit(weight: Array, position: Array, num_clusters: int) -> Mixture:
    """Fit clusters to the particles of each group by EM for a Gaussian mixture.

    A cluster of few particles takes most of its shape from the mean over the clusters.

    Parameters
    ----------
    weight
        Normalised, or all zero, (groups, num_particles).
    position
        (groups, num_particles, dim)
    """
    dim, dtype = position.shape[-1], position.dtype
    mean = jnp.einsum("jn,jnd->jd", weight, position)[:, None]
    variance = jnp.einsum("jn,jnd->jd", weight, (position - mean) ** 2)[:, None]
    scale = jnp.sqrt(jnp.maximum(variance, _TINY))
    rows, eye = (position - mean) / scale, jnp.eye(dim, dtype=dtype)
    # As many particles as a covariance has rows, and two, count for the common shape.
    prior = (dim + 2) * jnp.sum(weight**2, -1)[:, None, None, None]

    def maximise(share: Array) -> Mixture:
        total = jnp.sum(share, -1)
        centre = jnp.einsum("jkn,jnd->jkd", share, rows) / (total[..., None] + _TINY)
        centred = rows[:, None] - centre[:, :, None]
        scatter = jnp.einsum("jkn,jknd,jkne->jkde", share, centred, centred)
        common = scatter.sum(1, keepdims=True)
        covariance = (scatter + prior * common) / (total[..., None, None] + prior + _TINY)
        factor = linalg.cholesky(covariance + _RIDGE * eye)
        return Mixture(jnp.log(total), centre, factor)

    def improve(_: int, mixture: Mixture) -> Mixture:
        squares = _squares(mixture.mean, _inverse(mixture.factor), rows)
        log_density = mixture.log_share[..., None] - 0.5 * squares
        log_density -= _log_determinant(mixture.factor)
        # An empty cluster has no density anywhere, and none has any in a dead group.
        share = jnp.nan_to_num(jax.nn.softmax(log_density, 1))
        return maximise(weight[:, None] * share)

    seeds = _seeds(weight, rows, num_clusters)
    distance = jnp.sum((rows[:, None] - seeds[:, :, None]) ** 2, -1)
    first = jax.nn.one_hot(jnp.argmin(distance, 1), num_clusters, axis=1, dtype=dtype)
    found = lax.fori_loop(0, _EM_STEPS, improve, maximise(weight[:, None] * first))
    return share(
        Mixture(
            found.log_share,
            mean + scale * found.mean,
            scale[..., None] * found.factor,
        )
    )


def with_common(mixture: Mixture, mean: Array, factor: Array, share: float) -> Mixture:
    """Add clusters that have a share in every group's proposal.

    Parameters
    ----------
    mean
        (a multiple of the clusters of a group, dim)
    factor
        (likewise, dim, dim)
    """
    num_groups, num_clusters, dim = mixture.mean.shape
    mean = mean.reshape(-1, num_clusters, dim)
    factor = factor.reshape(-1, num_clusters, dim, dim)
    others = max(num_groups - 1, 1)
    each = jnp.log(share / (1 - share) * others / mean[..., 0].size)
    common = Mixture(jnp.full(mean.shape[:2], each, mean.dtype), mean, factor)
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mixture, common)


def _loo_log_share(mixture: Mixture, num_groups: int) -> Array:
    """Return the shares of all clusters in each group's proposal.

    (num_groups, groups and rows of common clusters, clusters)
    """
    own = jnp.eye(num_groups, len(mixture.mean), dtype=bool)[..., None]
    log_share = jnp.where(own, -jnp.inf, mixture.log_share)
    return log_share - logsumexp(log_share, (1, 2), keepdims=True)


def loo_log_density(mixture: Mixture, position: Array) -> Array:
    """Return the log-density of each group's proposal at rows of it.

    (num_groups, num_rows) of rows (num_groups, num_rows, dim)
    """
    inverse = _inverse(mixture.factor)
    clusters = mixture.mean, inverse, _log_determinant(mixture.factor)

    def from_group(source: Any) -> Array:
        (mean, inverse, log_determinant), log_share = source
        squares = _squares(mean, inverse, position)
        log_density = student.log_density(squares, position.shape[-1], log_determinant)
        return logsumexp(log_share[..., None] + log_density, 1)

    # One group's clusters at a time: memory does not grow with particles times clusters.
    log_share = jnp.swapaxes(_loo_log_share(mixture, len(position)), 0, 1)
    return logsumexp(lax.map(from_group, (clusters, log_share)), 0)


def loo_draw(rng_key: PRNGKey, mixture: Mixture, shape: tuple[int, int]) -> Array:
    """Draw from each group's proposal, (*shape, dim), with the groups first."""
    num_groups, dim = shape[0], mixture.mean.shape[-1]
    dtype = mixture.mean.dtype
    tiny = np.finfo(dtype).eps
    # One call of the generator for all: a compiler takes seconds for each.
    uniform = random.uniform(rng_key, (dim + 2, *shape), dtype, tiny)
    share = jnp.exp(_loo_log_share(mixture, num_groups).reshape(num_groups, 1, -1))
    below = jnp.cumsum(share, -1) < uniform[0, ..., None]
    chosen = jnp.minimum(below.sum(-1), share.shape[-1] - 1)
    mean, factor = (leaf.reshape(-1, *leaf.shape[2:])[chosen] for leaf in mixture[1:])
    noise = jnp.moveaxis(ndtri(jnp.clip(uniform[2:], tiny, 1 - tiny)), 0, -1)
    noise = noise * student.radius(uniform[1])[..., None]
    return mean + jnp.einsum("jnde,jne->jnd", factor, noise)
