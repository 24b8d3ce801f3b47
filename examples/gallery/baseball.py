"""Batting averages, after NumPyro's example ``baseball``.

The data are those of Efron and Morris (1975): hits of 18 players in 45 times at bat.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64, log_half_cauchy
from scipy import special, stats

AFTER = PAGES + "examples/baseball.html"
HITS = [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]
DATA = float32(np.full(18, 45), HITS)


def fully_pooled(at_bats: Array, hits: Array) -> None:
    """Give all players the same chance."""
    chance = numpyro.sample("chance", dist.Uniform(0.0, 1.0))
    with numpyro.plate("player", len(hits)):
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


def not_pooled(at_bats: Array, hits: Array) -> None:
    """Give each player a chance that says nothing of the others'."""
    with numpyro.plate("player", len(hits)):
        chance = numpyro.sample("chance", dist.Uniform(0.0, 1.0))
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


def partially_pooled(at_bats: Array, hits: Array) -> None:
    """Draw the chances from a Beta distribution, of which mean and size are latent."""
    mean = numpyro.sample("mean", dist.Uniform(0.0, 1.0))
    size = numpyro.sample("size", dist.Pareto(1.0, 1.5))
    with numpyro.plate("player", len(hits)):
        chance = numpyro.sample("chance", dist.Beta(mean * size, (1 - mean) * size))
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


def logistic(at_bats: Array, hits: Array) -> None:
    """Draw the log odds from a normal distribution, of which mean and sd are latent."""
    loc = numpyro.sample("loc", dist.Normal(-1.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("player", len(hits)):
        log_odds = numpyro.sample("log_odds", dist.Normal(loc, scale))
        numpyro.sample("hits", dist.Binomial(at_bats, logits=log_odds), obs=hits)


def log_choose() -> float:
    """Compute the logarithm of the number of ways to the hits of each player, summed."""
    n, y = float64(*DATA)
    return float((-np.log(n + 1) - special.betaln(n - y + 1, y + 1)).sum())


def fully_pooled_exact(_: dict[str, Any]) -> float:
    """Integrate one chance: a Beta function."""
    n, y = float64(*DATA)
    return log_choose() + float(special.betaln(y.sum() + 1, (n - y).sum() + 1))


def not_pooled_exact(_: dict[str, Any]) -> float:
    """Integrate each chance: every number of hits is as probable as any other."""
    return float(-np.log(DATA[0].astype(float) + 1).sum())


def partially_pooled_exact(_: dict[str, Any]) -> float:
    """Integrate the chances in closed form, then their mean and size by quadrature."""
    n, y = float64(*DATA)

    def log_density(mean: Array, share: Array) -> Array:
        size = share ** (-1 / 1.5)  # Pareto, by its quantiles
        a, b = (mean * size)[:, None], ((1 - mean) * size)[:, None]
        return (special.betaln(a + y, b + n - y) - special.betaln(a, b)).sum(-1)

    whole = [(0.0, 1.0), (0.0, 1.0)]
    return log_choose() + box(log_density, whole, num_nodes=400)


def logistic_exact(_: dict[str, Any]) -> float:
    """Integrate each player by quadrature, then mean and scale."""
    n, y = float64(*DATA)
    z, width = np.linspace(-8.0, 8.0, 161, retstep=True)
    log_normal = stats.norm.logpdf(z) + np.log(width)
    hits, counts = np.unique(y, return_counts=True)

    def log_density(loc: Array, log_scale: Array) -> Array:
        eta = loc[:, None] + np.exp(log_scale)[:, None] * z
        each = hits[:, None, None] * eta - n[0] * np.logaddexp(0.0, eta)
        players = special.logsumexp(each + log_normal, axis=-1)
        prior = stats.norm(-1.0, 1.0).logpdf(loc) + log_half_cauchy(log_scale)
        return counts @ players + prior

    return log_choose() + box(log_density, [(-2.5, 0.5), (-16.0, 2.0)], num_nodes=120)


ENTRIES = {
    "baseball_fully_pooled": Entry(
        fully_pooled,
        DATA,
        AFTER,
        "one batting average for all",
        fully_pooled_exact,
        "closed form",
        shown="chance",
    ),
    "baseball_not_pooled": Entry(
        not_pooled,
        DATA,
        AFTER,
        "a batting average for each",
        not_pooled_exact,
        "closed form",
        shown="chance",
    ),
    "baseball_partially_pooled": Entry(
        partially_pooled,
        DATA,
        AFTER,
        "Beta-binomial batting averages",
        partially_pooled_exact,
        "quadrature",
        shown="mean",
    ),
    "baseball_logistic": Entry(
        logistic,
        DATA,
        AFTER,
        "logistic-normal batting averages",
        logistic_exact,
        "quadrature",
        shown="scale",
    ),
}
