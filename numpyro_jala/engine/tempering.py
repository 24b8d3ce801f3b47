"""Choose the next temperature between the reference and the posterior."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala._typing import Array
from numpyro_jala.engine.loo import is_alive, loo_island_mean
from numpyro_jala.engine.weights import conditional_fraction

#: Share of the effective sample size that one change of the target may cost.
DROP = 0.03
#: Standard deviations that particles may follow a rise of the temperature. Its cost is seen to
#: first order: a rate that is linear in the gradient seems to cost nothing at any distance. Of
#: a Gamma prior and a count of zero, where it is, one step went from prior to posterior and
#: the log-evidence along the path was 4 nats low in every island.
FARTHEST = 0.5
_LOG_INCREMENTS = np.linspace(-40.0, 0.0, 80)


def longest_increment(
    weight: Array, slope: Array, drift: Array, drop: float = DROP
) -> Array:
    """Return the logarithm of the largest increment of the temperature that is cheap.

    Parameters
    ----------
    weight
        Normalised within each island, (num_islands, components, num_particles).
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

    class Search(NamedTuple):
        cheap: Array  # the last increment that is cheap
        left: Array  # the most that any increment leaves
        best: Array  # and which one

    def look(found: Search, log_increment: Array) -> tuple[Search, None]:
        change = jnp.exp(log_increment) * slope + drift
        left = conditional_fraction(weight, -change)
        is_best = left > found.left
        new = Search(
            jnp.where(left >= 1 - drop, log_increment, found.cheap),
            jnp.where(is_best, left, found.left),
            jnp.where(is_best, log_increment, found.best),
        )
        return new, None

    # One after the other, so that memory does not grow with the number of increments.
    none = jnp.full(weight.shape[:-1], -jnp.inf, weight.dtype)
    grid = jnp.asarray(_LOG_INCREMENTS, weight.dtype)
    found, _ = lax.scan(look, Search(none, none, jnp.full_like(none, grid[0])), grid)
    return jnp.where(jnp.isfinite(found.cheap), found.cheap, found.best)


def next_temperature(
    temperature: Array,
    weight: Array,
    slope: Array,
    drift: Array,
    reach: Array,
    hold: Array,
    drop: float = DROP,
) -> Array:
    """Return the next temperatures (num_islands, components).

    An island goes as far as the other islands could go. With ``hold`` the temperature
    stays where it is, unless it is zero still.

    Parameters
    ----------
    reach
        How far particles that follow the temperature would go for a unit of it, in
        standard deviations, (num_islands, components).
    """

    def advance() -> Array:
        increments = longest_increment(weight, slope, drift, drop)
        increment = loo_island_mean(increments, is_alive(weight))
        most = FARTHEST / jnp.maximum(reach, FARTHEST)
        new = jnp.minimum(temperature + jnp.minimum(jnp.exp(increment), most), 1.0)
        return jnp.where(hold & (temperature > 0), temperature, new)

    return lax.cond(jnp.all(temperature >= 1), lambda: temperature, advance)
