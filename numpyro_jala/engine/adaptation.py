"""How long a step each component of an island takes.

The log step sizes are per island and component, and an island uses the mean of the other
islands' ones.
"""

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

from numpyro_jala._typing import Array
from numpyro_jala.engine.weights import conditional_fraction

#: Variance of the log-weights that one move at a fixed target may cause.
MOVE_VARIANCE = 0.1
#: Where a Metropolis test follows, a step may be this much longer, or has to be this much
#: shorter, as steps are long or short. At this size it is as long as others are.
_LONGER, _SHORTER, _SHORT_STEP = 2.0, 0.5, 0.004
#: Units of the last digit by which a potential may be off.
_ROUNDINGS = 4
#: In whitened coordinates a step size of one forgets a Gaussian at once.
LARGEST_STEP = 0.6
_STEP_SIZE_RATE = 0.3


def gaussian_step_size(sizes: np.ndarray) -> np.ndarray:
    """Return the step sizes that Gaussians of these dimensions bear."""
    return np.minimum(LARGEST_STEP, (2 * MOVE_VARIANCE / sizes) ** (1 / 3))


def weight_variance(weight: Array, increment: Array) -> Array:
    """Return the variance of log-weights that increments cause, for each island."""
    return -jnp.log(jnp.clip(conditional_fraction(weight, increment), 1e-3, 1.0))


def refusal_variance(weight: Array, increment: Array) -> Array:
    """Return the variance of log-ratios at which as many tests would be passed."""
    passed = jnp.sum(weight * jnp.exp(jnp.minimum(increment, 0.0)), -1)
    return 4 * ndtri(0.5 * jnp.clip(passed, 1e-6, 1.0)) ** 2


def rounding_variance(weight: Array, potential: Array) -> Array:
    """Return the variance of log-ratios that no shorter step would make smaller."""
    size = jnp.sum(weight * jnp.abs(potential), -1)
    return (_ROUNDINGS * np.finfo(potential.dtype).eps * size) ** 2


def tested_multiplier(step_size: Array) -> Array:
    """Return by how much a step is longer where a Metropolis test follows.

    A rejected particle reverses its momentum and retraces its path. So the shorter the
    step size, the fewer rejections are allowed.
    """
    return jnp.clip(jnp.sqrt(step_size / _SHORT_STEP), _SHORTER, _LONGER)


def momentum_memory(step_size: Array) -> Array:
    """Return what a step leaves of the momentum, which should last for a length of one."""
    return jnp.exp(-jnp.sqrt(2 * step_size))


def adapt_step_size(log_step_size: Array, variance: Array, allowed: Array) -> Array:
    """Move each island's log step size towards the variance that is allowed."""
    # The variance grows with the cube of the step size.
    change = jnp.log(allowed / jnp.maximum(variance, 1e-12)) / 3
    new = log_step_size + _STEP_SIZE_RATE * jnp.clip(change, -2.0, 1.0)
    return jnp.minimum(new, jnp.log(LARGEST_STEP))
