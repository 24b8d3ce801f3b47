"""Integrals in float64: the exact answers behind the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Array = NDArray[Any]


def float32(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Round arrays to what the model sees."""
    return tuple(np.asarray(array, np.float32) for array in arrays)


def float64(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Widen arrays for the exact answers."""
    return tuple(np.asarray(array, np.float64) for array in arrays)


def approximate(
    log_density_fn: Callable[[Array], Any], start: ArrayLike
) -> tuple[Array, Array]:
    """Find the mode of a log-density, and a Cholesky factor of its covariance there."""
    mode = optimize.minimize(lambda z: -log_density_fn(z), start, method="BFGS").x
    # differences, because the Hessian that BFGS leaves can be off by a factor of two
    steps = 1e-3 * np.eye(mode.size)
    hessian = [[mixed_difference(log_density_fn, mode, a, b) for a in steps] for b in steps]
    return mode, np.linalg.cholesky(np.linalg.inv(-np.array(hessian) / 1e-6))


def mixed_difference(fn: Callable[[Array], Any], z: Array, a: Array, b: Array) -> float:
    """Difference a function at ``z`` along ``a`` and then along ``b``."""
    same, opposite = fn(z + a + b) + fn(z - a - b), fn(z + a - b) + fn(z - a + b)
    return float(same - opposite) / 4


def importance_sampling(
    log_density_fn: Callable[[Array], Array],
    start: ArrayLike,
    num_draws: int,
    chunk: int = 10_000,
) -> tuple[float, float]:
    """Integrate a density by draws from a t; give the logarithm and its se."""
    mode, scale_tril = approximate(log_density_fn, start)
    proposal = stats.multivariate_t(mode, 1.1 * scale_tril @ scale_tril.T, df=8, seed=1)
    log_weight = np.empty((num_draws // chunk, chunk))
    for row in log_weight:
        draws = proposal.rvs(chunk)
        row[:] = log_density_fn(draws) - proposal.logpdf(draws)
    top = log_weight.max()
    weight = np.exp(log_weight - top)
    se = weight.std() / weight.mean() / np.sqrt(weight.size)
    return float(top + np.log(weight.mean())), float(se)


def gauss_hermite(
    log_density_fn: Callable[[Array], float], start: ArrayLike, num_nodes: int = 12
) -> float:
    """Integrate a density in two dimensions around its mode; give the logarithm."""
    mode, scale_tril = approximate(log_density_fn, start)
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    grid = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
    log_weight = np.log(np.outer(weights, weights)).ravel() + 0.5 * (grid**2).sum(1)
    values = [log_density_fn(mode + scale_tril @ z) for z in grid]
    log_scale = np.log(np.diag(scale_tril)).sum()
    return float(special.logsumexp(values + log_weight) + log_scale)


def integrate_groups(
    log_density_fn: Callable[[Array], Array], offset: Array, sd: float
) -> float:
    r"""Integrate one normal effect out of each group; give the log-likelihood.

    .. math:: \sum_g \log \int N(z; 0, 1) \prod_i p(y_{gi} \mid o_{gi} + s z) \, dz

    ``offset`` holds :math:`o`, one row per group, and ``sd`` is :math:`s`. The
    trapezoidal rule converges geometrically, since the integrand is analytic.
    """
    z, width = np.linspace(-8, 8, 401, retstep=True)
    log_joint = log_density_fn(offset[..., None] + sd * z).sum(1) + stats.norm.logpdf(z)
    return float(special.logsumexp(log_joint + np.log(width), axis=1).sum())
