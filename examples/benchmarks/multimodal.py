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
from quadrature import Array, approximate, float32, float64
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


def log_weights(z: Array) -> Array:
    """Return the logarithms of three weights, from two log-odds at the end of rows."""
    odds = np.concatenate([z[..., 4:], np.zeros_like(z[..., :1])], -1)
    return odds - special.logsumexp(odds, axis=-1, keepdims=True)


def log_joint(z: Array, y: Array) -> Array:
    """Compute the log-density of centres, the log-scale and two log-odds, in rows."""
    centre, log_scale, log_weight = z[..., :3], z[..., 3], log_weights(z)
    prior = stats.norm(0, 5).logpdf(centre).sum(-1) + stats.norm.logpdf(log_scale)
    prior += math.log(2.0) + log_weight.sum(-1)  # of the weights, and the Jacobian
    noise = stats.norm(centre[..., None], np.exp(log_scale)[..., None, None])
    each = log_weight[..., None] + noise.logpdf(y)
    return prior + special.logsumexp(each, axis=-2).sum(-1)


class Anywhere:
    """Proposals that know no modes, with centres in order.

    Each centre is near a point of the data or from its prior, by itself, so that clusters
    which share a centre or have no points are covered too.
    """

    near, shares, log_scale = 0.6, (0.25, 0.75), stats.t(5, 0.2, 0.4)
    weights = (1.0, 6.0)  # Dirichlet, as often the one as the other

    def __init__(self, y: Array) -> None:
        self.y = y

    def draw(self, rng: np.random.Generator, size: int) -> Array:
        """Draw rows as :func:`log_joint` takes them."""
        centre = rng.choice(self.y, (size, 3)) + self.near * rng.normal(size=(size, 3))
        wide = rng.random((size, 3)) < self.shares[0]
        centre = np.sort(np.where(wide, 5 * rng.normal(size=(size, 3)), centre))
        log_scale = self.log_scale.rvs((size, 1), random_state=rng)
        concentration = rng.choice(self.weights, (size, 1))
        log_weight = np.log(rng.gamma(concentration, size=(size, 3)))
        odds = log_weight[:, :2] - log_weight[:, 2:]
        return np.concatenate([centre, log_scale, odds], 1)

    def log_density(self, z: Array) -> Array:
        """Compute the log-density of rows whose centres are in order."""
        centre, log_weight = z[..., :3], log_weights(z)
        near = stats.norm(self.y, self.near).logpdf(centre[..., None])
        near = special.logsumexp(near, axis=-1) - math.log(len(self.y))
        log_share = np.log(self.shares)
        log_density = np.logaddexp(
            log_share[0] + stats.norm(0, 5).logpdf(centre), log_share[1] + near
        ).sum(-1)
        log_density += math.log(6.0) + self.log_scale.logpdf(z[..., 3])
        each = [
            special.gammaln(3 * a) - 3 * special.gammaln(a) + a * log_weight.sum(-1)
            for a in self.weights
        ]
        return log_density + np.logaddexp(*each) - math.log(2.0)


@cache
def three_clusters(num_draws: int = 1_000_000) -> Evidence:
    """Give the answer by importance sampling, with centres in order: a sixth of the mass.

    Half of the draws are from a t around the main mode, half from anywhere.
    """
    data, rng = three_clusters_data(), np.random.default_rng(1)
    (y,) = float64(*data)
    start = np.array([-3.0, 0.5, 5.0, 0.0, 0.0, 0.0])
    mode, scale_tril = approximate(partial(log_joint, y=y), start)
    main = stats.multivariate_t(mode, 1.1 * scale_tril @ scale_tril.T, df=8, seed=rng)
    anywhere, half = Anywhere(y), 5_000
    log_weight = []
    for _ in range(num_draws // (2 * half)):
        z = np.concatenate([main.rvs(half), anywhere.draw(rng, half)])
        proposal = np.logaddexp(main.logpdf(z), anywhere.log_density(z)) - math.log(2.0)
        in_order = (np.diff(z[:, :3]) > 0).all(1)
        log_weight.append(np.where(in_order, log_joint(z, y) - proposal, -np.inf))
    weight = np.exp(np.concatenate(log_weight) - (top := np.max(log_weight)))
    se = weight.std() / weight.mean() / np.sqrt(weight.size)
    value = top + np.log(weight.mean()) + math.log(6.0)
    return Evidence(three_clusters_model, data, float(value), float(se))


#: By name, with how to pose them.
MULTIMODAL = {
    "two_modes_2": partial(two_modes, 2),
    "two_modes_4": partial(two_modes, 4),
    "two_modes_8": partial(two_modes, 8),
    "three_clusters": three_clusters,
}
