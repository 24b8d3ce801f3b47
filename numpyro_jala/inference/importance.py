r"""Estimate the evidence of each component by importance sampling.

An island's proposal for a component is a multivariate Student t with four degrees of
freedom, located and scaled by the other islands. Its tails are heavier than those of most
posteriors, so that no draw has a weight without bound. Points are quasi-random: one Sobol'
sequence for all, shifted at random for each island and each component, which leaves every
estimate unbiased and the estimates of components independent (Owen 1998).

With draws :math:`x_k` from :math:`q` the evidence of a component is the mean of
:math:`e^{-U(x_k)} / q(x_k)`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import logsumexp, ndtri
from scipy.stats import qmc

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.precision import total
from numpyro_jala.engine import student
from numpyro_jala.engine.factor import apply, log_determinant, solve
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.weights import log_mean_exp, normalise
from numpyro_jala.inference.evidence import Bridge, Gaussian, bridge


def sobol_points(num_points: int, dim: int) -> np.ndarray:
    """Return points of a Sobol' sequence, (num_points, dim), a power of two of them."""
    sequence = qmc.Sobol(dim, scramble=False)
    return np.asarray(sequence.random_base2(int(np.log2(num_points))), np.float32)


class Shifts(NamedTuple):
    """Random shifts of the points, for each island and coordinate or component."""

    normal: Array  # (num_islands, dim)
    radius: Array  # (num_islands, components)


def draw_shifts(rng_key: PRNGKey, proposal: Gaussian, partition: Partition) -> Shifts:
    """Draw the shifts, which make quasi-random points uniform."""
    normal_key, radius_key = random.split(rng_key)
    dtype, num_islands = proposal.mean.dtype, len(proposal.mean)
    shape = (num_islands, partition.num_components)
    return Shifts(
        random.uniform(normal_key, proposal.mean.shape, dtype),
        random.uniform(radius_key, shape, dtype),
    )


def draw(
    shifts: Shifts, proposal: Gaussian, partition: Partition, points: Array
) -> tuple[Array, Array]:
    """Draw from each island's proposals; return positions and log-densities.

    Parameters
    ----------
    proposal
        Location and scale of the Student t.
    points
        A sequence in the unit cube of one dimension more than the largest component,
        (num_draws, dimensions).

    Returns
    -------
    Positions (num_islands, num_draws, dim) and log-densities (num_islands, components,
    num_draws).
    """
    mean, factor = proposal
    tiny = np.finfo(mean.dtype).eps

    def shifted(columns: Array, shift: Array) -> Array:
        # Away from the ends, where quantiles are infinite.
        return jnp.clip((columns + shift[:, None]) % 1.0, tiny, 1 - tiny)

    noise = ndtri(shifted(points[:, partition.slot], shifts.normal))
    radius = student.radius(shifted(points[:, -1:], shifts.radius))
    noise = noise * partition.spread(radius)
    position = mean[:, None] + apply(factor, partition, noise)
    return position, _log_density(proposal, partition, noise)


def _log_density(proposal: Gaussian, partition: Partition, noise: Array) -> Array:
    """Return the log-density of each component, given whitened draws."""
    log_norm = log_determinant(proposal.factor, partition)[..., None]
    squares = partition.total(noise**2)
    return student.log_density(squares, partition.sizes[:, None], log_norm)


def log_density(proposal: Gaussian, partition: Partition, position: Array) -> Array:
    """Return the proposals' log-density of each component at given positions."""
    noise = solve(proposal.factor, partition, position - proposal.mean[:, None])
    return _log_density(proposal, partition, noise)


class Importance(NamedTuple):
    """What importance sampling says of each component.

    log_evidence
        With the bias of its logarithm taken out.
    variance
        Of ``log_evidence``, from the islands.
    ess
        Effective sample size of the weights as a share of the draws.
    islands
        Each island's log-evidence of each component.
    """

    log_evidence: Array  # (components,)
    variance: Array  # (components,)
    ess: Array  # (components,)
    islands: Array  # (num_islands, components)


class Sums(NamedTuple):
    """What some draws say together.

    first, second
        Logarithms of the sums of weights and of their squares.
    mean
        Of some other values, by the weights.
    """

    first: Array  # (num_islands, components)
    second: Array  # (num_islands, components)
    mean: Array  # (num_islands, components, columns)


def sums(log_ratio: Array, values: Array | None = None) -> Sums:
    """Add up weights of draws, given log-ratios of target to proposal.

    Parameters
    ----------
    log_ratio
        (num_islands, components, num_draws)
    values
        To be averaged with the weights, (num_islands, components, num_draws, columns).
    """
    if values is None:
        values = jnp.zeros((*log_ratio.shape, 0), log_ratio.dtype)
    mean = jnp.einsum("icn,icnp->icp", normalise(log_ratio), values)
    return Sums(logsumexp(log_ratio, -1), logsumexp(2 * log_ratio, -1), mean)


def merge(one: Sums, other: Sums) -> Sums:
    """Put what two sets of draws say together."""
    share = normalise(jnp.stack([one.first, other.first], -1))[..., None, :]
    return Sums(
        jnp.logaddexp(one.first, other.first),
        jnp.logaddexp(one.second, other.second),
        one.mean * share[..., 0] + other.mean * share[..., 1],
    )


def estimate(found: Sums, num_draws: int | Array) -> Importance:
    """Estimate the evidence of each component from the sums of so many draws."""
    each, squares = (part - jnp.log(num_draws) for part in found[:2])
    pooled = log_mean_exp(each.T)
    ratio = jnp.exp(each - pooled)
    variance = jnp.var(ratio, 0, ddof=1) / len(each)
    ess = jnp.exp(2 * pooled - log_mean_exp(squares.T))
    return Importance(pooled + variance / 2, variance, ess, each)


def bridged(
    found: Importance, weight: Array, at_particles: Array, at_draws: Array
) -> Importance:
    """Estimate the evidence from draws and particles together, by a bridge.

    In many dimensions particles know more of the tails than draws from any proposal.

    Parameters
    ----------
    found
        What the draws alone say.
    weight
        Of the particles, (num_islands, components, num_particles).
    at_particles, at_draws
        Log-ratios of target to proposal.
    """
    bridge_fn = partial(bridge, is_quasi=True)
    together = jax.vmap(bridge_fn, 1)(weight, at_particles, at_draws)
    return Importance(
        jnp.asarray(together.log_evidence),
        jnp.asarray(together.standard_error) ** 2,
        found.ess,
        jnp.asarray(together.islands).T,
    )


def choose(use_second: np.ndarray, first: Importance, second: Importance) -> Importance:
    """Take the second estimate for some components."""
    return Importance(
        *(jnp.where(use_second, b, a) for a, b in zip(first, second, strict=True))
    )


def each(found: Importance, level: np.ndarray) -> np.ndarray:
    """Return the log-evidence of each component, in double precision."""
    return np.subtract(found.log_evidence, level, dtype=np.float64)


def summed(found: Importance, level: Array | np.ndarray) -> Bridge:
    """Sum over components, whose potentials are higher by ``level`` than given.

    Without the error of rounding: of a sum of a million, single precision keeps no digit
    after the point.
    """
    num_islands = len(found.islands)
    correction = num_islands * found.variance / 2
    return Bridge(
        total(found.log_evidence, -level),
        total(found.variance) ** 0.5,
        found.ess.min(),
        total(found.islands, correction, -level),
    )
