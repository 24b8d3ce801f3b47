"""What an entry of the gallery consists of, and integrals for its answers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[Any]
PAGES = "https://num.pyro.ai/en/stable/"


class Entry(NamedTuple):
    """A model after one of NumPyro's pages, with data and what is known of its evidence.

    model, args
        As :class:`numpyro_jala.JALAEM` and its ``run`` take them.
    after
        The page of NumPyro's documentation that has the model first.
    title
        A few words for the table.
    exact
        The log-evidence as a function of the params; without it, the answer is that of
        ``answers.json``, if there is one.
    by
        How the answer is found.
    collapsed
        Another model and its arguments with the same evidence, of which fewer latents are
        left: it is what ``reference.py`` integrates.
    shown
        The latent site that the page's picture shows.
    num_steps
        Of EM; none without params.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    after: str
    title: str
    exact: Callable[[dict[str, Any]], float] | None = None
    by: str = ""
    collapsed: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    shown: str | None = None
    num_steps: int = 0


def float32(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Round arrays to what the model sees."""
    return tuple(np.asarray(array, np.float32) for array in arrays)


def float64(*arrays: ArrayLike) -> tuple[Array, ...]:
    """Widen arrays for the answers."""
    return tuple(np.asarray(array, np.float64) for array in arrays)


def box(
    log_density_fn: Callable[..., Array], bounds: ArrayLike, num_nodes: int = 60
) -> float:
    """Integrate over a box by Gauss and Legendre's rule; give the logarithm.

    ``log_density_fn`` takes one array for each side of the box, all of one length.
    """
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    low, high = np.asarray(bounds, float).T
    axes = [a + (b - a) * (nodes + 1) / 2 for a, b in zip(low, high, strict=True)]
    logs = [np.log(weights * (b - a) / 2) for a, b in zip(low, high, strict=True)]
    grid = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    log_weight = sum(each.ravel() for each in np.meshgrid(*logs, indexing="ij"))
    pieces = np.array_split(np.arange(log_weight.size), max(1, log_weight.size // 20_000))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # densities of zero
        values = [log_density_fn(*(axis[piece] for axis in grid)) for piece in pieces]
    return float(special.logsumexp(np.concatenate(values) + log_weight))


def gaussian_log_density(y: Array, covariance: Array, mean: ArrayLike = 0.0) -> float:
    """Compute the log-density of a normal vector."""
    mean = np.broadcast_to(mean, y.shape)
    return float(stats.multivariate_normal(mean, covariance).logpdf(y))


def log_half_cauchy(log_value: Array, scale: float = 1.0) -> Array:
    """Compute the log-density of the logarithm of a half-Cauchy variable."""
    return stats.halfcauchy(scale=scale).logpdf(np.exp(log_value)) + log_value
