"""Small networks, after NumPyro's examples ``bnn`` and ``vae``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, float32, float64
from jax import nn
from numpyro.distributions import constraints
from scipy import special, stats


def curve(num: int = 30) -> tuple[Array, Array]:
    """Draw a standardised curve; its predictors are powers of one."""
    rng = np.random.default_rng(61)
    x = np.linspace(-1, 1, num)
    y = 0.5 * x + 0.5 * (0.5 + x) ** 2 * np.sin(4 * x) + 0.05 * rng.normal(size=num)
    powers = x[:, None] ** np.arange(3)
    return float32(powers, ((y - y.mean()) / y.std())[:, None])


def bayesian_network(x: Array, y: Array, width: int) -> None:
    """Two hidden layers, with a prior on every weight."""
    first = numpyro.sample("first", dist.Normal(jnp.zeros((x.shape[1], width)), 1.0))
    second = numpyro.sample("second", dist.Normal(jnp.zeros((width, width)), 1.0))
    third = numpyro.sample("third", dist.Normal(jnp.zeros((width, 1)), 1.0))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    mean = jnp.tanh(jnp.tanh(x @ first) @ second) @ third
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(precision)).to_event(1), obs=y)


def ordered_network(x: Array, y: Array, width: int) -> None:
    """The same network, its units of one sign and in order, which leaves the evidence.

    A unit may be exchanged for another one or for its negative, if the weights that leave it
    go along. So the evidence is the integral over one order of one sign, times how many
    there are for the two layers.
    """
    units = constraints.positive_ordered_vector
    start = numpyro.sample("start", dist.ImproperUniform(units, (), (width,)))
    third = numpyro.sample("third", dist.ImproperUniform(units, (), (width,)))
    rest = numpyro.sample("rest", dist.Normal(jnp.zeros((x.shape[1] - 1, width)), 1.0))
    second = numpyro.sample("second", dist.Normal(jnp.zeros((width, width)), 1.0))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    num_orders = 2.0**width * special.factorial(width)
    log_prior = dist.Normal().log_prob(start).sum() + dist.Normal().log_prob(third).sum()
    numpyro.factor("units", log_prior + 2 * np.log(num_orders))
    first = jnp.concatenate([start[None], rest])
    mean = jnp.tanh(jnp.tanh(x @ first) @ second) @ third[:, None]
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(mean, 1 / jnp.sqrt(precision)).to_event(1), obs=y)


def pictures() -> Array:
    """Draw 40 pictures of six pixels, dark up to some place."""
    rng = np.random.default_rng(62)
    place = rng.uniform(0, 6, (40, 1))
    dark = (np.arange(6) < place) ^ (rng.random((40, 6)) < 0.05)
    return float32(dark)[0]


def decoder(pixels: Array) -> None:
    """Pixels behind a network of one latent number for each picture."""
    inner = numpyro.param("inner", jnp.array([1.0, -1.0, 0.5]))
    bias = numpyro.param("bias", jnp.array([0.0, 0.5, -0.5]))
    outer = numpyro.param("outer", 0.5 * jnp.array(np.linspace(-1, 1, 18).reshape(3, 6)))
    offset = numpyro.param("offset", jnp.zeros(6))
    with numpyro.plate("picture", pixels.shape[0]):
        z = numpyro.sample("z", dist.Normal())
        hidden = nn.softplus(z[:, None] * inner + bias)
        logits = hidden @ outer + offset
        numpyro.sample("pixels", dist.Bernoulli(logits=logits).to_event(1), obs=pixels)


def decoder_exact(params: dict[str, Any]) -> float:
    """Integrate the number behind each picture by quadrature, at the params."""
    (pixels,) = float64(pictures())
    weights = {name: np.asarray(value, float) for name, value in params.items()}
    z, width = np.linspace(-8.0, 8.0, 1601, retstep=True)
    hidden = np.logaddexp(0.0, z[:, None] * weights["inner"] + weights["bias"])
    logits = hidden @ weights["outer"] + weights["offset"]
    each = pixels @ special.log_expit(logits).T
    each += (1 - pixels) @ special.log_expit(-logits).T
    log_prior = stats.norm.logpdf(z) + np.log(width)
    return float(special.logsumexp(each + log_prior, axis=-1).sum())


ENTRIES = {
    "bayesian_network": Entry(
        bayesian_network,
        (*curve(), 3),
        PAGES + "examples/bnn.html",
        "network with priors on its weights",
        by="bridge from draws of NUTS",
        collapsed=(ordered_network, (*curve(), 3)),
        shown="precision",
    ),
    "decoder": Entry(
        decoder,
        (pictures(),),
        PAGES + "examples/vae.html",
        "decoder, weights as params",
        decoder_exact,
        "quadrature",
        shown="z",
        num_steps=200,
    ),
}
