"""Models without params whose posterior has several modes, and their log-evidence."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.funsor import config_enumerate
from problems import Evidence
from quadrature import Array, float32, float64, importance_sampling
from scipy import special, stats

#: Share and scale of a bump, and where it is in the first coordinate.
BUMPS = ((0.3, 0.3, 4.0), (0.7, 0.6, -4.0))
PRIOR_SCALE = 3.0


def two_modes_model(dim: int) -> None:
    """A narrow bump and a wide one, far apart."""
    prior = dist.Normal(0.0, PRIOR_SCALE).expand([dim]).to_event(1)
    x = numpyro.sample("x", prior)
    numpyro.factor("bumps", log_bumps(x))


def log_bumps(x: Any) -> Any:
    """Compute the log-density of the two bumps."""
    each = [
        jnp.log(share)
        + dist.Normal(jnp.eye(x.shape[-1])[0] * place, scale).log_prob(x).sum(-1)
        for share, scale, place in BUMPS
    ]
    return jnp.logaddexp(*each)


def two_modes(dim: int) -> Evidence:
    """Give the answer in closed form: a Gaussian prior times Gaussian bumps."""
    each = [
        np.log(share)
        + stats.norm(place * np.eye(dim)[0], np.hypot(PRIOR_SCALE, scale)).logpdf(0).sum()
        for share, scale, place in BUMPS
    ]
    return Evidence(partial(two_modes_model, dim), (), float(np.logaddexp(*each)))


def three_clusters_data() -> tuple[Array, ...]:
    """Draw 30 points from three normal distributions that overlap a bit."""
    rng = np.random.default_rng(0)
    return float32(np.repeat([-3.0, 0.5, 5.0], [8, 12, 10]) + rng.normal(size=30))


@config_enumerate
def three_clusters_model(y: Array) -> None:
    """Three normal distributions of one scale, whose labels may be exchanged."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("cluster", 3):
        centre = numpyro.sample("centre", dist.Normal(0.0, 5.0))
    with numpyro.plate("point", len(y)):
        which = numpyro.sample("which", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(centre[which], scale), obs=y)


@cache
def three_clusters() -> Evidence:
    """Give the answer by importance sampling around one of six modes that are alike.

    A draw counts if its centres are in order; every order has as much of the posterior.
    """
    data = three_clusters_data()
    (y,) = float64(*data)

    def log_density(z: Array) -> Array:
        """Of centres, the logarithm of the scale, and two log-odds of the weights."""
        centre, log_scale = z[..., :3], z[..., 3]
        odds = np.concatenate([z[..., 4:], np.zeros_like(z[..., :1])], -1)
        log_weight = odds - special.logsumexp(odds, axis=-1, keepdims=True)
        prior = stats.norm(0, 5).logpdf(centre).sum(-1) + stats.norm.logpdf(log_scale)
        prior += math.log(2.0) + log_weight.sum(-1)  # of the weights, and the Jacobian
        noise = stats.norm(centre[..., None], np.exp(log_scale)[..., None, None])
        each = log_weight[..., None] + noise.logpdf(y)
        total = prior + special.logsumexp(each, axis=-2).sum(-1)
        in_order = (np.diff(centre, axis=-1) > 0).all(-1)
        return np.where(in_order, total, -np.inf)

    start = np.array([-3.0, 0.5, 5.0, 0.0, 0.0, 0.0])
    value, error = importance_sampling(log_density, start, 400_000)
    return Evidence(three_clusters_model, data, value + math.log(6.0), error)


#: By name, with how to pose them.
MULTIMODAL = {
    "two_modes_2": partial(two_modes, 2),
    "two_modes_4": partial(two_modes, 4),
    "two_modes_8": partial(two_modes, 8),
    "three_clusters": three_clusters,
}
