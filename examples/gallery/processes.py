"""Gaussian processes and differential equations, after NumPyro's examples and tutorials."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64
from jax import lax
from numpyro.contrib.hsgp.approximation import hsgp_squared_exponential
from scipy import stats

INTEGRATED = "importance sampling from draws of NUTS"
#: Hare and lynx pelts in thousands, collected by the Hudson's Bay Company, 1900 to 1910.
HARES = [30.0, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22.0, 25.4, 27.1]
LYNXES = [4.0, 6.1, 9.8, 35.2, 59.4, 41.7, 19.0, 13.0, 8.3, 9.1, 7.4]
PELTS = float32(np.stack([HARES, LYNXES], -1))[0]


def curve(num: int = 25) -> tuple[Array, Array]:
    """Draw a standardised curve with noise."""
    rng = np.random.default_rng(41)
    x = np.linspace(-1, 1, num)
    y = x + 0.5 * (0.5 + x) ** 2 * np.sin(4 * x) + 0.15 * rng.normal(size=num)
    return float32(x, (y - y.mean()) / y.std())


def gaussian_process(x: Array, y: Array) -> None:
    """A smooth function; variance, noise and length may be anything within e^30."""
    variance = numpyro.sample("variance", dist.LogNormal(0.0, 10.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 10.0))
    length = numpyro.sample("length", dist.LogNormal(0.0, 10.0))
    squares = ((x[:, None] - x) / length) ** 2
    kernel = variance * jnp.exp(-0.5 * squares) + (noise + 1e-6) * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(0.0, kernel), obs=y)


def log_gaussian(y: Array, covariances: Array) -> Array:
    """Compute the log-density of a vector for many covariances."""
    roots = np.linalg.cholesky(covariances)
    z = np.linalg.solve(roots, np.broadcast_to(y[:, None], (len(roots), y.size, 1)))
    half_logs = np.log(np.diagonal(roots, axis1=-2, axis2=-1)).sum(-1)
    return -0.5 * ((z**2).sum((-2, -1)) + y.size * np.log(2 * np.pi)) - half_logs


def gaussian_process_exact(_: dict[str, Any]) -> float:
    """Integrate over the logarithms of all three, piece by piece."""
    x, y = float64(*curve())
    squares = (x[:, None] - x) ** 2

    def log_density(variance: Array, noise: Array, length: Array) -> Array:
        prior = sum(stats.norm(0, 10).logpdf(z) for z in (variance, noise, length))
        v, s, scale = (np.exp(z)[:, None, None] for z in (variance, noise, length))
        jitter = (s + 1e-6) * np.eye(y.size) + 1e-12 * v * np.eye(y.size)
        return prior + log_gaussian(y, v * np.exp(-0.5 * squares / scale**2) + jitter)

    wide, narrow = [(-30.0, -6.0), (2.0, 30.0)], [(-6.0, -2.0), (-2.0, 2.0)]
    lengths = [(-30.0, -4.0), (-4.0, -1.5), (-1.5, 1.0), (1.0, 4.0), (4.0, 14.0)]
    edges = wide + narrow
    parts = [
        box(log_density, [a, b, c], num_nodes=16)
        for a in edges
        for b in edges
        for c in lengths
    ]
    return float(np.logaddexp.reduce(parts))


def hilbert_space(x: Array, y: Array, num_basis: int) -> None:
    """A smooth function by few basis functions on an interval."""
    variance = numpyro.sample("variance", dist.InverseGamma(12.0, 10.0))
    length = numpyro.sample("length", dist.InverseGamma(6.0, 1.0))
    noise = numpyro.sample("noise", dist.InverseGamma(12.0, 10.0))
    f = hsgp_squared_exponential(
        x=x, alpha=variance, length=length, ell=1.3, m=num_basis, non_centered=True
    )
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def hilbert_space_exact(_: dict[str, Any], num_basis: int = 8, reach: float = 1.3) -> float:
    """Integrate the weights in closed form, then the three others by quadrature."""
    x, y = float64(*curve())
    root = np.arange(1, num_basis + 1) * np.pi / (2 * reach)
    basis = np.sin(root * (x[:, None] + reach)) / np.sqrt(reach)
    priors = [stats.invgamma(12, scale=10), stats.invgamma(6, scale=1)]

    def log_density(log_variance: Array, log_length: Array, log_noise: Array) -> Array:
        variance, length, noise = (
            np.exp(z)[:, None] for z in (log_variance, log_length, log_noise)
        )
        density = np.sqrt(2 * np.pi) * length * np.exp(-0.5 * (length * root) ** 2)
        weights = variance * density  # the first argument of a kernel is its variance
        covariance = np.einsum("ik,nk,jk->nij", basis, weights, basis)
        covariance += noise[..., None] ** 2 * np.eye(y.size)
        prior = priors[0].logpdf(variance) + priors[0].logpdf(noise)
        prior = (prior + priors[1].logpdf(length))[:, 0]
        return prior + log_variance + log_length + log_noise + log_gaussian(y, covariance)

    return box(log_density, [(-1.7, 1.7), (-3.5, 1.0), (-2.0, 1.2)], num_nodes=30)


def predator_prey(pelts: Array) -> None:
    """Lotka and Volterra's equations by steps of Runge and Kutta, four a year."""
    first = numpyro.sample("first", dist.LogNormal(jnp.log(10.0), 1.0).expand([2]))
    centre, spread = jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])
    rates = numpyro.sample("rates", dist.TruncatedNormal(centre, spread, low=0.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0).expand([2]))
    size = 0.25

    def slope(log_number: Any) -> Any:
        number = jnp.exp(log_number)
        hare = rates[0] - rates[1] * number[1]
        return jnp.stack([hare, rates[3] * number[0] - rates[2]])

    def step(now: Any, _: Any) -> Any:
        one = slope(now)
        two = slope(now + size / 2 * one)
        three = slope(now + size / 2 * two)
        four = slope(now + size * three)
        return now + size / 6 * (one + 2 * two + 2 * three + four), now

    num_steps = 4 * len(pelts)
    _, path = lax.scan(step, jnp.log(first), None, length=num_steps)
    numpyro.sample("pelts", dist.LogNormal(path[::4], noise).to_event(2), obs=pelts)


ENTRIES = {
    "gaussian_process": Entry(
        gaussian_process,
        curve(),
        PAGES + "examples/gp.html",
        "Gaussian process, wide priors",
        gaussian_process_exact,
        "quadrature",
        shown="length",
    ),
    "hilbert_space_gp": Entry(
        hilbert_space,
        (*curve(), 8),
        PAGES + "tutorials/hsgp_example.html",
        "Hilbert-space Gaussian process",
        hilbert_space_exact,
        "closed form and quadrature",
        shown="length",
    ),
    "predator_prey": Entry(
        predator_prey,
        (PELTS,),
        PAGES + "examples/ode.html",
        "hares and lynx, differential equations",
        by=INTEGRATED,
        shown="rates",
    ),
}
