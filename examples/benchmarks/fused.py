"""The paper's algorithm written out by hand, as fast as one would write it.

No model language, no islands, no diagnostics: one loop of potential, gradient, noise,
weights, resampling and Adam, for a potential in plain jax.numpy. What the package costs
beyond this is the price of its generality.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random

from numpyro_jala.backend.precision import HIGHEST, roughly

PRIOR_VARIANCE = 5.0


def logistic_potential(theta: Any, w: Any, x: Any, y: Any) -> Any:
    """Minus the log joint density of a logistic regression, up to a constant."""
    logits = x @ w
    log_likelihood = jnp.sum(y * logits - jax.nn.softplus(logits))
    return 0.5 * jnp.sum((w - theta) ** 2) / PRIOR_VARIANCE - log_likelihood


def network_potential(
    num_classes: int, theta: Any, position: Any, x: Any, labels: Any
) -> Any:
    """The same of a network of two layers whose scales are the exponentials of theta."""
    num_pixels = x.shape[1]
    num_units = position.size // (num_pixels + num_classes)
    cut = num_pixels * num_units
    first = position[:cut].reshape(num_pixels, num_units)
    second = position[cut:].reshape(num_units, num_classes)
    logits = jnp.tanh(x @ first) @ second
    chances = jax.nn.log_softmax(logits)
    log_likelihood = jnp.take_along_axis(chances, labels[:, None], 1).sum()
    prior = 0.0
    for layer, log_scale in ((first, theta[0]), (second, theta[1])):
        prior += 0.5 * jnp.sum(layer**2) * jnp.exp(-2 * log_scale) + layer.size * log_scale
    return prior - log_likelihood


def make(
    potential: Callable[..., Any],
    step_size: float,
    rate: float,
    threshold: float,
    precision: str,
) -> Callable[..., Any]:
    """Return a compiled function of (rng_key, theta, particles, num_steps, *data).

    Matrices are multiplied at the given precision for the potential, and for its gradient
    as fast as the device's default is, unless the precision is the highest.
    """
    optim = optax.adam(rate)
    h = step_size

    def run(rng_key: Any, theta: Any, position: Any, num_steps: Any, *data: Any) -> Any:
        count, dim = position.shape
        each = jax.vmap(lambda t, x: potential(t, x, *data), (None, 0))

        def evaluate(t: Any, x: Any) -> Any:
            with jax.default_matmul_precision(precision):
                value, pull = jax.vjp(each, t, x)
            pull = pull if precision == HIGHEST else roughly(pull)
            return value, pull(jnp.ones(count))[1], lambda weight: pull(weight)[0]

        def resample(key: Any, log_weight: Any, arrays: Any) -> Any:
            weight = jax.nn.softmax(log_weight)
            points = (jnp.arange(count) + random.uniform(key)) / count
            ancestors = jnp.searchsorted(jnp.cumsum(weight), points)
            ancestors = jnp.minimum(ancestors, count - 1)
            return jax.tree.map(lambda leaf: leaf[ancestors], arrays)

        def step(_: Any, carry: Any) -> Any:
            key, t, memory, x, value, gradient, log_weight, log_z = carry
            key, noise_key, resample_key = random.split(key, 3)
            noise = random.normal(noise_key, (count, dim))
            move = -h * gradient + jnp.sqrt(2 * h) * noise
            new_value, new_gradient, score_fn = evaluate(t, x + move)
            work = 0.5 * jnp.sum(move * (gradient + new_gradient), -1)
            work += 0.25 * h * jnp.sum(gradient**2 - new_gradient**2, -1)
            log_weight = log_weight + value - new_value + work
            weight = jax.nn.softmax(log_weight)
            updates, memory = optim.update(score_fn(weight), memory, t)
            due = 1 / jnp.sum(weight**2) < threshold * count
            arrays = x + move, new_value, new_gradient
            arrays = lax.cond(
                due, lambda: resample(resample_key, log_weight, arrays), lambda: arrays
            )
            level = jax.nn.logsumexp(log_weight) - jnp.log(count)
            log_z = log_z + jnp.where(due, level, 0.0)
            log_weight = jnp.where(due, 0.0, log_weight)
            return (key, t + updates, memory, *arrays, log_weight, log_z)

        value, gradient, _ = evaluate(theta, position)
        zero = jnp.zeros(count)
        first = (rng_key, theta, optim.init(theta), position, value, gradient, zero, 0.0)
        return lax.fori_loop(0, num_steps, step, first)

    return jax.jit(run)


def logistic_data() -> tuple[np.ndarray, np.ndarray]:
    """Draw data of the size of the Wisconsin study: 683 rows, nine columns."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(683, 9)).astype(np.float32)
    chance = 1 / (1 + np.exp(-x @ rng.normal(size=9)))
    return x, (rng.random(683) < chance).astype(np.float32)
