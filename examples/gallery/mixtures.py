"""Mixtures and small networks of discrete variables, summed out."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64
from numpyro.contrib.funsor import config_enumerate
from scipy import special, stats

POINTS = float32([0.0, 1.0, 10.0, 11.0, 12.0])


@config_enumerate
def gaussian_mixture(y: Array) -> None:
    """Two normal distributions of one scale, and who belongs to which."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.full(2, 0.5)))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 2.0))
    with numpyro.plate("cluster", 2):
        centre = numpyro.sample("centre", dist.Normal(0.0, 10.0))
    with numpyro.plate("point", len(y)):
        which = numpyro.sample("which", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(centre[which], scale), obs=y)


def cluster_log_density(y: Array, scale: Array) -> Array:
    """Integrate the centre of a cluster with these points, for an array of scales."""
    noise, prior, n = scale**2, 100.0, y.size
    spread = np.sum(y**2) / noise - y.sum() ** 2 * prior / (noise * (noise + n * prior))
    log_det = (n - 1) * np.log(noise) + np.log(noise + n * prior)
    return -0.5 * (spread + log_det + n * np.log(2 * np.pi))


def gaussian_mixture_exact(_: dict[str, Any]) -> float:
    """Sum over the 32 assignments; given one, only the scale has no closed form."""
    (y,) = float64(*POINTS)

    def log_density(log_scale: Array) -> Array:
        scale, terms = np.exp(log_scale), []
        for which in product([0, 1], repeat=y.size):
            count = np.sum(which)
            chance = special.betaln(0.5 + count, 0.5 + y.size - count)
            chance -= special.betaln(0.5, 0.5)
            parts = [y[np.equal(which, k)] for k in (0, 1)]
            given = [cluster_log_density(part, scale) for part in parts if part.size]
            terms.append(chance + sum(given))
        return special.logsumexp(terms, axis=0) + stats.norm(0, 2).logpdf(log_scale)

    return box(log_density, [(-14.0, 14.0)], num_nodes=400)


def chain_data() -> tuple[Array, Array]:
    """Draw 200 rows of A and C, with B between them unseen."""
    rng = np.random.default_rng(1)
    a = rng.random(200) < 0.3
    b = rng.random(200) < np.where(a, 0.15, 0.9)
    c = rng.random(200) < np.where(b, 0.2, 0.85)
    return a.astype(np.int32), c.astype(np.int32)


@config_enumerate
def hidden_link(a: Array, c: Array) -> None:
    """Three coins in a row, A to B to C, of which B is never seen."""
    p_a = numpyro.sample("p_a", dist.Beta(1.0, 1.0))
    p_b = numpyro.sample("p_b", dist.Beta(jnp.ones(2), jnp.ones(2)).to_event(1))
    p_c = numpyro.sample("p_c", dist.Beta(jnp.ones(2), jnp.ones(2)).to_event(1))
    with numpyro.plate("row", len(a)):
        numpyro.sample("a", dist.Bernoulli(p_a), obs=a)
        b = numpyro.sample("b", dist.Bernoulli(p_b[a]))
        numpyro.sample("c", dist.Bernoulli(p_c[b]), obs=c)


def hidden_link_exact(_: dict[str, Any]) -> float:
    """Sum over how many rows of each kind have B, and integrate the chances."""
    a, c = chain_data()
    kinds = [(i, j, int(np.sum((a == i) & (c == j)))) for i in (0, 1) for j in (0, 1)]
    counts = np.meshgrid(*[np.arange(n + 1) for *_, n in kinds], indexing="ij")
    with_b = {(i, j): k for (i, j, _), k in zip(kinds, counts, strict=True)}
    total = {(i, j): n for i, j, n in kinds}
    ways = sum(
        special.gammaln(total[key] + 1)
        - special.gammaln(k + 1)
        - special.gammaln(total[key] - k + 1)
        for key, k in with_b.items()
    )
    for i in (0, 1):  # of B given A
        yes = with_b[i, 0] + with_b[i, 1]
        ways = ways + special.betaln(1 + yes, 1 + total[i, 0] + total[i, 1] - yes)
    seen = with_b[0, 1] + with_b[1, 1], with_b[0, 0] + with_b[1, 0]
    ways = ways + special.betaln(1 + seen[0], 1 + seen[1])
    rest = total[0, 1] + total[1, 1] - seen[0], total[0, 0] + total[1, 0] - seen[1]
    ways = ways + special.betaln(1 + rest[0], 1 + rest[1])
    ones = float(a.sum())
    return float(special.logsumexp(ways) + special.betaln(1 + ones, 1 + a.size - ones))


def dual_moon_log_density(first: Any, second: Any, xp: Any = jnp) -> Any:
    """Compute the density of two moons that face each other, up to a constant."""
    radius = xp.sqrt(first**2 + second**2)
    right, left = -0.5 * ((first - 2) / 0.8) ** 2, -0.5 * ((first + 2) / 0.8) ** 2
    return -0.5 * ((radius - 2) / 0.4) ** 2 + xp.logaddexp(right, left)


def dual_moon() -> None:
    """Two moons, as a factor on a uniform square."""
    x = numpyro.sample("x", dist.Uniform(-6.0, 6.0).expand([2]).to_event(1))
    numpyro.factor("moons", dual_moon_log_density(x[0], x[1]))


def dual_moon_exact(_: dict[str, Any]) -> float:
    """Integrate over the square."""

    def log_density(first: Array, second: Array) -> Array:
        return dual_moon_log_density(first, second, np) - 2 * np.log(12.0)

    return box(log_density, [(-6.0, 6.0)] * 2, num_nodes=400)


def shells(dim: int) -> None:
    """Two thin shells of radius two, one half as probable as the other."""
    x = numpyro.sample("x", dist.Uniform(-7.0, 7.0).expand([dim]).to_event(1))
    centre = jnp.zeros(dim).at[0].set(3.5)
    gaps = jnp.array([jnp.linalg.norm(x + centre), jnp.linalg.norm(x - centre)]) - 2.0
    each = jnp.log(jnp.array([1.0, 2.0]) / 3) - 0.5 * (gaps / 0.1) ** 2
    numpyro.factor("shells", jnp.logaddexp(*each))


def shells_exact(dim: int) -> float:
    """Integrate over the radius; the shells are apart and within the box."""
    area = np.log(2) + 0.5 * dim * np.log(np.pi) - special.gammaln(0.5 * dim)

    def log_density(radius: Array) -> Array:
        return (dim - 1) * np.log(radius) - 0.5 * ((radius - 2) / 0.1) ** 2

    return area + box(log_density, [(1.0, 3.0)], num_nodes=200) - dim * np.log(14.0)


ENTRIES = {
    "gaussian_mixture": Entry(
        gaussian_mixture,
        POINTS,
        PAGES + "tutorials/gmm.html",
        "two clusters of five points",
        gaussian_mixture_exact,
        "enumeration and quadrature",
        shown="scale",
    ),
    "hidden_link": Entry(
        hidden_link,
        chain_data(),
        PAGES + "examples/toy_mixture_model_discrete_enumeration.html",
        "three coins, one unseen",
        hidden_link_exact,
        "enumeration",
        shown="p_b",
    ),
    "dual_moon": Entry(
        dual_moon,
        (),
        PAGES + "examples/neutra.html",
        "two moons",
        dual_moon_exact,
        "quadrature",
        shown="x",
    ),
    "gaussian_shells": Entry(
        shells,
        (4,),
        PAGES + "examples/gaussian_shells.html",
        "two thin shells in four dimensions",
        lambda _: shells_exact(4),
        "quadrature",
        shown="x",
    ),
}
