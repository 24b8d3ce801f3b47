r"""Estimate the evidence at one target afresh, by an optimal bridge to Gaussians.

Each island's particles are bridged to draws from a Gaussian fitted on the *other*
islands (Meng and Wong 1996). With the log-ratio :math:`l` of target to Gaussian, and
shares :math:`s_1, s_2` of particles and draws, the evidence :math:`Z` solves

.. math::

    \sum E_q\left[\frac{e^l}{s_1 e^l + s_2 Z}\right]
        = \sum E_\pi\left[\frac{Z}{s_1 e^l + s_2 Z}\right],

where the sums run over the islands.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import logsumexp

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.engine.factor import Factor, apply, log_determinant, solve
from numpyro_jala.engine.geometry import loo_factor
from numpyro_jala.engine.langevin import draw_noise
from numpyro_jala.engine.loo import loo_mean
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.weights import log_mean_exp

_ITERATIONS = 200


class Gaussian(NamedTuple):
    """A normal distribution for each island and component, in flat coordinates."""

    mean: Array  # (num_islands, dim)
    factor: Factor


def log_density(gaussian: Gaussian, partition: Partition, position: Array) -> Array:
    """Return the log-density of rows (num_islands, num_rows, dim), by component."""
    centred = position - gaussian.mean[:, None]
    squares = partition.total(solve(gaussian.factor, partition, centred) ** 2)
    log_norm = log_determinant(gaussian.factor, partition)
    log_norm += 0.5 * jnp.log(2 * jnp.pi) * partition.sizes
    return -0.5 * squares - log_norm[..., None]


def fit_loo(
    weight: Array, position: Array, gradient: Array, partition: Partition, most_dense: int
) -> Gaussian:
    """Fit a Gaussian for each island on the particles of the others."""
    means = [
        loo_mean(w, x)[:, :, None]
        for w, x in zip(partition.of_block(weight), partition.split(position), strict=True)
    ]
    factor = loo_factor(weight, position, gradient, partition, most_dense)
    return Gaussian(partition.join(means)[:, 0], factor)


def standard(like: Gaussian) -> Gaussian:
    """Return the standard normal distribution, in arrays of the same shapes."""
    zero = jnp.zeros_like(like.mean)

    def one(block: Array) -> Array:
        if block.ndim == 3:
            return jnp.ones_like(block)
        return jnp.broadcast_to(jnp.eye(block.shape[-1], dtype=block.dtype), block.shape)

    return Gaussian(zero, Factor(tuple(map(one, like.factor.blocks))))


class Bridge(NamedTuple):
    """An estimate of the log-evidence.

    standard_error
        Of ``log_evidence``.
    overlap
        Between zero and one: how much of the particles the Gaussians cover.
    islands
        What each island says by itself, to see whether they agree.
    """

    log_evidence: Array | np.ndarray  # ()
    standard_error: Array | np.ndarray  # ()
    overlap: Array | np.ndarray  # ()
    islands: Array | np.ndarray  # (num_islands,)


class Compared(NamedTuple):
    """Two estimates of the same log-evidence.

    bridge
        From particles to Gaussians.
    drawn
        By importance sampling from mixtures.
    pareto_shape
        Of the tail of the draws' weights: from 0.7 on their mean alone is not to be trusted.
    """

    bridge: Bridge
    drawn: Bridge
    agrees: bool
    pareto_shape: float


def bridge(
    weight: Array,
    at_particles: Array,
    at_draws: Array,
    is_quasi: bool = False,
    share: float | None = None,
) -> Bridge:
    """Solve for the evidence, given log-ratios of target to Gaussian.

    Parameters
    ----------
    weight
        Of the particles, normalised within each island, (num_islands, num_particles).
    at_particles, at_draws
        Log-ratios at the particles and at draws from the Gaussians, by island.
    is_quasi
        Whether an island's draws are of one shifted sequence, not independent.
    share
        Of the particles in the sum of both; ``None`` as many as are effective. With none at
        all this is importance sampling.
    """
    num_islands = weight.shape[0]
    squares = jnp.sum(weight**2)
    effective = num_islands**2 / jnp.maximum(squares, 1e-30)
    kept_share = effective / (effective + at_draws.size) if share is None else share
    log_share, log_rest = jnp.log(kept_share), jnp.log1p(-kept_share)

    # In logarithms throughout: where the Gaussians miss the target, all terms are tiny.
    def draw_terms(log_z: Array) -> Array:
        return at_draws - jnp.logaddexp(log_share + at_draws, log_rest + log_z)

    def particle_terms(log_z: Array) -> Array:
        total = jnp.logaddexp(log_share + at_particles, log_rest + log_z)
        return logsumexp(jnp.where(weight > 0, log_z - total, 0.0), -1, weight)

    def mismatch(log_z: Array) -> Array:
        return log_mean_exp(draw_terms(log_z).ravel()) - log_mean_exp(particle_terms(log_z))

    def refine(_: int, log_z: Array) -> Array:
        return log_z + mismatch(log_z)

    log_z = lax.fori_loop(0, _ITERATIONS, refine, log_mean_exp(at_draws.ravel()))
    slope = jnp.abs(jax.grad(mismatch)(log_z))
    log_drawn, log_kept = draw_terms(log_z), particle_terms(log_z)
    level = log_mean_exp(log_kept)
    drawn, kept = jnp.exp(log_drawn - level), jnp.exp(log_kept - level)
    # Particles are independent only between islands. Where the Gaussian is nearly the
    # target, an island's term is a product of its own deviation and that of the rest,
    # each pair of islands counts twice, and the plain variance is half of it.
    drawn = drawn.mean(1) if is_quasi else drawn
    variance = jnp.var(drawn, ddof=1) / drawn.size + 2 * jnp.var(kept, ddof=1) / num_islands
    error = jnp.sqrt(variance) / slope
    own = log_mean_exp(log_drawn) - log_kept
    return Bridge(log_z, error, jnp.exp(level), log_z + own / slope)


def at_level(found: Bridge, level: Array) -> Bridge:
    """Return the estimate for potentials that are higher by ``level``.

    In double precision: of a log-evidence of a million, single precision keeps no digit
    after the point.
    """
    log_evidence, islands = (
        np.asarray(each, np.float64) - np.asarray(level, np.float64)
        for each in (found.log_evidence, found.islands)
    )
    return found._replace(log_evidence=log_evidence, islands=islands)


def draw_loo(
    rng_key: PRNGKey, gaussian: Gaussian, partition: Partition, position: Array
) -> tuple[Array, Array, Array]:
    """Return draws from each island's Gaussian, and log-densities at both ends."""
    noise = draw_noise(rng_key, position.shape, position.dtype)
    draws = gaussian.mean[:, None] + apply(gaussian.factor, partition, noise)
    return (
        draws,
        log_density(gaussian, partition, position),
        log_density(gaussian, partition, draws),
    )


def unknown(num_islands: int) -> Bridge:
    """Stand in for an estimate where there are no other islands to bridge to."""
    nan = jnp.asarray(jnp.nan)
    return Bridge(nan, nan, nan, jnp.full((num_islands,), jnp.nan))
