"""Choose the next temperature between the reference and the posterior."""

import jax.numpy as jnp
from jax import lax

from numpyro_jala._typing import Array
from numpyro_jala.engine.adaptation import loo_island_mean
from numpyro_jala.engine.weights import conditional_fraction

#: Share of the effective sample size that one change of the target may cost.
DROP = 0.03
_LOG_INCREMENTS = (-40.0, 0.0, 80)  # first, last, how many


def longest_increment(
    weight: Array, slope: Array, drift: Array, drop: float = DROP
) -> Array:
    """Return the logarithm of the largest increment of the temperature that is cheap.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, num_particles).
    slope
        Rate of the potential in the temperature, likewise.
    drift
        Change of the potential that the parameters cause in the same step, likewise. It
        may cancel that of the temperature, so the cost need not grow with the increment.
    drop
        Share of the effective sample size that it may cost.
    """
    finite = jnp.isfinite(slope) & jnp.isfinite(drift) & (weight > 0)
    weight = jnp.where(finite, weight, 0.0)
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)
    slope, drift = jnp.where(finite, slope, 0.0), jnp.where(finite, drift, 0.0)
    grid = jnp.linspace(*_LOG_INCREMENTS, dtype=weight.dtype)
    change = jnp.exp(grid)[:, None, None] * slope + drift
    left = conditional_fraction(weight, -change)  # (len(grid), num_islands)
    cheap = left >= 1 - drop
    last = grid.size - 1 - jnp.argmax(cheap[::-1], axis=0)
    return grid[jnp.where(cheap.any(0), last, jnp.argmax(left, axis=0))]


def next_temperature(
    temperature: Array,
    weight: Array,
    slope: Array,
    drift: Array,
    hold: Array,
    drop: float = DROP,
) -> Array:
    """Return each island's next temperature, as far as the other islands could go.

    With ``hold`` the temperature stays where it is, unless it is zero still.
    """

    def advance() -> Array:
        increments = longest_increment(weight, slope, drift, drop)
        increment = loo_island_mean(increments, weight.sum(-1) > 0)
        new = jnp.minimum(temperature + jnp.exp(increment), 1.0)
        return jnp.where(hold & (temperature > 0), temperature, new)

    return lax.cond(jnp.all(temperature >= 1), lambda: temperature, advance)
