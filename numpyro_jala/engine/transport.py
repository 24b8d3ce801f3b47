r"""Carry the cloud along when its target moves.

A target that depends on a number :math:`t` (the temperature or a parameter) changes the
potential of a particle at the rate :math:`r = \partial_t U`. If the particles shift by
:math:`-B\,dt` meanwhile, the rate becomes

.. math:: r - B \cdot \nabla_x U .

Since :math:`E[\nabla_x U] = 0` under the target, unless its density jumps, its mean is
that of :math:`r`: it is a control variate for the score. And its variance is what the
change costs in weights. For a Gaussian target whose location depends on :math:`t` some
:math:`B` brings both to zero.

The shift of an island is learned from the other islands, for each component.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine import linalg
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.loo import loo_covariance
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.weights import pool

_RIDGE = 1e-6
#: A regression on the gradients needs this many other particles for each coordinate.
_DRAWS_PER_DIM = 8
#: A mean this many standard errors from zero is not zero.
_DOUBT = 5.0


class Transport(NamedTuple):
    """How the particles follow the temperature (first column) and the parameters.

    shift
        :math:`B`, zero for a column where following would cost more than it saves.
    learned
        :math:`B` before that choice, averaged over steps where it is noisy.
    rate
        What the change of the target costs each particle when it follows.
    """

    shift: Array  # (num_islands, columns, dim)
    learned: Array  # (num_islands, columns, dim)
    rate: Array  # (num_islands, components, num_particles, columns)


def none(cloud: Cloud, rate: Array) -> Transport:
    """Stand still while the target moves."""
    shape = rate.shape[0], rate.shape[-1], cloud.position.shape[-1]
    zero = jnp.zeros(shape, rate.dtype)
    return Transport(zero, zero, rate)


def _regress(weight: Array, gradient: Array, rate: Array, factor: Array) -> Array:
    """Fit the rates as linear functions of the gradient, which is exact for a Gaussian."""
    # Whitening saves digits and does not change the fit, so one factor serves all.
    common = factor[:1]
    whitened = within(weight, linalg.multiply(jnp.swapaxes(common, -1, -2), gradient))
    dim = whitened.shape[-1]
    moments = loo_covariance(weight, whitened, jnp.concatenate([whitened, rate], -1))
    gram, cross = moments[..., :dim], moments[..., dim:]
    trace = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    ridge = jnp.where(trace > 0, _RIDGE * trace / dim, 1.0) * jnp.eye(dim, dtype=gram.dtype)
    return common @ linalg.solve(gram + ridge, cross)


def _learn_block(
    weight: Array, x: Array, gradient: Array, rate: Array, factor: Array
) -> tuple[Array, bool]:
    """Return what a block learns, and whether that is noisy."""
    num_islands, _, num_particles = weight.shape
    num_loo = (num_islands - 1) * num_particles
    if factor.ndim == 4 and _DRAWS_PER_DIM * factor.shape[-1] <= num_loo:
        return _regress(weight, gradient, rate, factor), False
    # The mean moves by minus the covariance of position and rate. Each entry is noisy
    # and there are many.
    return loo_covariance(weight, x, rate), True


def learn(
    weight: Array,
    cloud: Cloud,
    rate: Array,
    factor: Factor,
    partition: Partition,
    last: Array,
    memory: Array,
) -> Transport:
    """Learn each island's shift from the others.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, components, num_particles).
    rate
        Derivatives of the potential, with a last axis of columns.
    factor
        Of the preconditioner; dense ones allow a regression on all coordinates.
    last, memory
        What was learned a step ago, and how much of it to keep where it is noisy.
    """
    rate = jnp.where(weight[..., None] > 0, rate, 0.0)
    centred = within(weight, rate)
    split = partition.split
    parts = zip(
        partition.of_block(weight),
        split(cloud.position),
        split(cloud.gradient),
        partition.of_block(centred),
        factor.blocks,
        split(last),
        strict=True,
    )
    learned, saved = [], []
    for own, x, gradient, own_rate, block, before in parts:
        fresh, is_noisy = _learn_block(own, x, gradient, own_rate, block)
        if is_noisy:
            fresh = memory * jnp.swapaxes(before, -1, -2) + (1 - memory) * fresh
        fresh = jnp.nan_to_num(fresh, posinf=0.0, neginf=0.0)
        learned.append(jnp.swapaxes(fresh, -1, -2))
        saved.append(gradient @ fresh)
    following = rate - jnp.concatenate(saved, 1)
    helps = variance(weight, following) < variance(weight, rate)
    helps &= is_centred(weight, rate - following)  # (components, columns)
    together = partition.join(learned)
    kept = jnp.where(partition.spread(helps.T), together, 0.0)
    return Transport(kept, together, jnp.where(helps[:, None], following, rate))


def within(weight: Array, values: Array) -> Array:
    """Subtract each island's mean: islands may be at different temperatures."""
    return values - jnp.einsum("jcn,jcnk->jck", weight, values)[:, :, None]


def is_centred(weight: Array, values: Array) -> Array:
    """Tell whether the mean of each column over all islands is zero, up to noise.

    Where the target's density jumps, as between the branches of a ``cond``, the mean of
    its gradient is not zero, and to take it for zero would bias the score.
    """
    pooled = pool(weight)[..., None]
    mean = jnp.sum(pooled * values, (0, 2))
    noise = jnp.sum(pooled**2 * (values - mean[:, None]) ** 2, (0, 2))
    return mean**2 <= _DOUBT**2 * noise


def _pooled_deviations(weight: Array, values: Array) -> tuple[Array, Array]:
    pooled = pool(weight)
    mean = jnp.einsum("jcn,jcnk->ck", pooled, values)
    return pooled, values - mean[:, None]


def products(weight: Array, first: Array, second: Array) -> Array:
    """Return the covariance of each component's columns over all islands."""
    pooled, deviations = _pooled_deviations(weight, first)
    return jnp.einsum("jcn,jcnk->ck", pooled, deviations * second)


def variance(weight: Array, values: Array) -> Array:
    """Return the variance of each component's columns over all islands."""
    pooled, deviations = _pooled_deviations(weight, values)
    return jnp.einsum("jcn,jcnk->ck", pooled, deviations**2)


def summed_covariance(weight: Array, values: Array) -> Array:
    """Return the covariance of the columns over all islands, summed over components."""
    pooled, deviations = _pooled_deviations(weight, values)
    flat = deviations.reshape(-1, values.shape[-1])
    return (flat * pooled.reshape(-1, 1)).T @ flat
