"""Draw ancestors in proportion to weights. One signature, four schemes.

Each scheme returns sorted ancestors, so that neighbours in the new cloud are relatives:
what then treats a cloud as a sequence of draws sees the duplicates as autocorrelation.
"""

import jax.numpy as jnp
from jax import random

from numpyro_jala._typing import Array, PRNGKey, Resampler
from numpyro_jala.engine.weights import normalise


def _invert(weight: Array, points: Array) -> Array:
    """Return the particle whose share of the unit interval holds each sorted point."""
    edges = jnp.cumsum(weight)
    ancestors = jnp.searchsorted(edges, points * edges[-1], side="right")
    # Rounding may put the last point on the last edge, past every living particle.
    last_alive = weight.shape[0] - 1 - jnp.argmax(weight[::-1] > 0)
    return jnp.minimum(ancestors, last_alive)


def systematic(rng_key: PRNGKey, log_weight: Array, num: int | None = None) -> Array:
    """Take evenly spaced points with one common random offset, as many as weights or ``num``.

    >>> print(systematic(random.key(0), jnp.log(jnp.array([0.5, 0.25, 0.0, 0.25]))))
    [0 0 1 3]
    """
    n = log_weight.shape[0] if num is None else num
    return _invert(normalise(log_weight), (jnp.arange(n) + random.uniform(rng_key)) / n)


def stratified(rng_key: PRNGKey, log_weight: Array) -> Array:
    """Take one random point in each of ``n`` equal strata."""
    n = log_weight.shape[0]
    offsets = random.uniform(rng_key, (n,))
    return _invert(normalise(log_weight), (jnp.arange(n) + offsets) / n)


def multinomial(rng_key: PRNGKey, log_weight: Array) -> Array:
    """Take ``n`` independent points."""
    n = log_weight.shape[0]
    return _invert(normalise(log_weight), jnp.sort(random.uniform(rng_key, (n,))))


def residual(rng_key: PRNGKey, log_weight: Array) -> Array:
    """Copy each particle as often as its whole share says, and draw only the rest."""
    n = log_weight.shape[0]
    share = n * normalise(log_weight)
    # Shares of equal weights are whole numbers up to rounding.
    copies = jnp.floor(share + 1e-4)
    rest = jnp.maximum(share - copies, 0.0)
    kept = jnp.repeat(jnp.arange(n), copies.astype(int), total_repeat_length=n)
    rest = jnp.where(rest.sum() > 0, rest, share)
    drawn = _invert(rest / rest.sum(), random.uniform(rng_key, (n,)))
    return jnp.sort(jnp.where(jnp.arange(n) < copies.sum(), kept, drawn))


SCHEMES: dict[str, Resampler] = {
    "systematic": systematic,
    "stratified": stratified,
    "residual": residual,
    "multinomial": multinomial,
}
