r"""Carry the cloud along when its target moves.

A target that depends on a number :math:`t` (the temperature or a parameter) changes the
potential of a particle at the rate :math:`r = \partial_t U`. If the particles shift by
:math:`-B\,dt` meanwhile, the rate becomes

.. math:: r - B \cdot \nabla_x U .

Since :math:`E[\nabla_x U] = 0` under the target, unless its density jumps, its mean is
that of :math:`r`: it is a control variate for the score. And its variance is what the
change costs in weights. For a Gaussian target whose location depends on :math:`t` some
:math:`B` brings both to zero.

The shift of an island is learned from the other islands.
"""

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine.adaptation import by_island, loo_covariance
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.weights import covariance, pool

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

    shift: Array  # (num_islands, dim, columns)
    learned: Array  # (num_islands, dim, columns)
    rate: Array  # (num_islands, num_particles, columns)


def none(cloud: Cloud, rate: Array) -> Transport:
    """Stand still while the target moves."""
    zero = jnp.zeros((rate.shape[0], cloud.position.shape[-1], rate.shape[-1]), rate.dtype)
    return Transport(zero, zero, rate)


def _regress(weight: Array, cloud: Cloud, rate: Array, factor: Array) -> Array:
    """Fit the rates as linear functions of the gradient, which is exact for a Gaussian."""
    # Whitening saves digits and does not change the fit, so one factor serves all.
    common = factor[0]
    whitened = within(weight, cloud.gradient @ common)
    dim = whitened.shape[-1]
    moments = loo_covariance(weight, whitened, jnp.concatenate([whitened, rate], -1))
    gram, cross = moments[..., :dim], moments[..., dim:]
    ridge = _RIDGE * jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / dim
    ridge = jnp.where(ridge > 0, ridge, 1.0) * jnp.eye(dim, dtype=gram.dtype)
    return common @ by_island(jnp.linalg.solve, gram + ridge, cross)


def learn(
    weight: Array, cloud: Cloud, rate: Array, factor: Array, last: Array, memory: Array
) -> Transport:
    """Learn each island's shift from the others.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    rate
        Derivatives of the potential, (num_islands, num_particles, columns).
    factor
        Of the preconditioner; dense ones allow a regression on all coordinates.
    last, memory
        What was learned a step ago, and how much of it to keep.
    """
    rate = jnp.where(weight[..., None] > 0, rate, 0.0)
    num_loo = weight.size - weight.shape[1]
    centred = within(weight, rate)
    if factor.ndim == 3 and _DRAWS_PER_DIM * factor.shape[-1] <= num_loo:
        learned = _regress(weight, cloud, centred, factor)
    else:
        # The mean moves by minus the covariance of position and rate. Each entry is
        # noisy and there are many: average them over the last steps.
        fresh = loo_covariance(weight, cloud.position, centred)
        learned = memory * last + (1 - memory) * fresh
    learned = jnp.nan_to_num(learned, posinf=0.0, neginf=0.0)
    following = rate - jnp.einsum("jnd,jdc->jnc", cloud.gradient, learned)
    helps = variance(weight, following) < variance(weight, rate)
    helps &= is_centred(weight, rate - following)
    return Transport(
        jnp.where(helps, learned, 0.0), learned, jnp.where(helps, following, rate)
    )


def within(weight: Array, values: Array) -> Array:
    """Subtract each island's mean: islands may be at different temperatures."""
    return values - jnp.einsum("jn,jnc->jc", weight, values)[:, None]


def is_centred(weight: Array, values: Array) -> Array:
    """Tell whether the mean of each column over the whole cloud is zero, up to noise.

    Where the target's density jumps, as between the branches of a ``cond``, the mean of
    its gradient is not zero, and to take it for zero would bias the score.
    """
    pooled = pool(weight)[..., None]
    mean = jnp.sum(pooled * values, (0, 1))
    noise = jnp.sum(pooled**2 * (values - mean) ** 2, (0, 1))
    return mean**2 <= _DOUBT**2 * noise


def variance(weight: Array, rate: Array) -> Array:
    """Return the variance of each column over the whole cloud."""
    return jnp.diagonal(pooled_covariance(weight, rate))


def pooled_covariance(weight: Array, rate: Array) -> Array:
    """Return the covariance of the columns over the whole cloud."""
    return covariance(pool(weight).reshape(-1), rate.reshape(-1, rate.shape[-1]))
