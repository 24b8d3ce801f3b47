"""How heavy the tail of importance weights is.

The largest weights follow a generalised Pareto distribution. Its shape k tells how many
moments the weights have, fewer than 1/k: from 0.5 on the variance of their mean is infinite,
and from 0.7 on the mean itself cannot be had from any practical number of draws (Vehtari et
al. 2024).
"""

from __future__ import annotations

import math

import numpy as np

#: Weights from which a tail can be told.
_FEWEST = 25
#: From here on a mean of weights is not to be trusted.
UNRELIABLE = 0.7


def shape(log_weight: np.ndarray) -> float:
    """Return the shape k of the tail of weights.

    The estimator is that of Zhang and Stephens (2009), with the weak prior of Vehtari et
    al. that draws it to one half where the tail is short. NaN with too few weights.
    """
    log_weight = np.sort(np.asarray(log_weight, np.float64).ravel())
    size = log_weight.size
    if size < _FEWEST or not np.isfinite(log_weight[-1]):
        return float("nan")
    length = math.ceil(min(size / 5, 3 * math.sqrt(size)))
    tail = np.exp(log_weight[-length - 1 :] - log_weight[-1])
    excess = tail[1:] - tail[0]
    return _fit(excess) if excess[-1] > 0 else float("-inf")


def _fit(excess: np.ndarray) -> float:
    """Fit a generalised Pareto distribution to sorted excesses, for its shape."""
    size = excess.size
    num_points = 30 + math.floor(math.sqrt(size))
    quartile = excess[math.floor(size / 4 + 0.5) - 1]
    steps = 1 - np.sqrt(num_points / (np.arange(1, num_points + 1) - 0.5))
    points = steps / (3 * max(quartile, 1e-300)) + 1 / excess[-1]
    shapes = np.log1p(-points[:, None] * excess).mean(1)
    log_profile = size * (np.log(-points / shapes) - shapes - 1)
    weight = np.exp(log_profile - log_profile.max())
    best = np.sum(points * weight) / weight.sum()
    found = np.log1p(-best * excess).mean()
    return float((size * found + 10 * 0.5) / (size + 10))
