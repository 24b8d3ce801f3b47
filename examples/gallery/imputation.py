"""Missing values, after NumPyro's tutorials on imputation."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, float32
from jax import nn
from numpyro.ops.indexing import Vindex
from scipy import special

AFTER = PAGES + "tutorials/bayesian_imputation.html"


def passengers(num: int = 60) -> tuple[Array, ...]:
    """Draw ages, titles and who survives; twelve ages are not known."""
    rng = np.random.default_rng(51)
    title = rng.integers(0, 2, num)
    age = np.array([-0.3, 0.5])[title] + np.array([0.8, 0.6])[title] * rng.normal(size=num)
    survived = rng.random(num) < special.expit(
        0.3 - 0.8 * age + np.array([0.5, -0.5])[title]
    )
    missing = np.sort(rng.choice(num, 12, replace=False)).astype(np.int32)
    age[missing] = 0.0
    age, survived = float32(age, survived)
    return age, missing, title.astype(np.int32), survived


def coefficients() -> tuple[Any, Any, Any]:
    """Sample what survival depends on."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    of_age = numpyro.sample("of_age", dist.Normal(0.0, 1.0))
    of_title = numpyro.sample("of_title", dist.Normal(0.0, 1.0).expand([2]))
    return intercept, of_age, of_title


def impute(
    age: Array, missing: Array, title: Array, survived: Array, is_printed: bool = False
) -> None:
    """Draw the missing ages from those of people with the same title.

    As it is printed on the page, the standard deviations have a normal prior, half of
    which is below zero, where the density is not a number.
    """
    intercept, of_age, of_title = coefficients()
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]))
    positive = dist.Normal(0.0, 1.0) if is_printed else dist.HalfNormal(1.0)
    spread = numpyro.sample("spread", positive.expand([2]))
    drawn = dist.Normal(mean[title[missing]], spread[title[missing]]).mask(False)
    ages = jnp.asarray(age).at[missing].set(numpyro.sample("drawn", drawn))
    numpyro.sample("age", dist.Normal(mean[title], spread[title]), obs=ages)
    logits = intercept + of_age * ages + of_title[title]
    numpyro.sample("survived", dist.Bernoulli(logits=logits), obs=survived)


def impute_as_printed(age: Array, missing: Array, title: Array, survived: Array) -> None:
    """The same with the page's prior of the standard deviations."""
    impute(age, missing, title, survived, is_printed=True)


def imputed_by_quadrature(
    age: Array, missing: Array, title: Array, survived: Array, log_factor: float = 0.0
) -> None:
    """Integrate each missing age by the rule of Gauss and Hermite."""
    intercept, of_age, of_title = coefficients()
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([2]))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0).expand([2]))
    numpyro.factor("constant", log_factor)
    known = np.setdiff1d(np.arange(len(age)), missing)
    ages = dist.Normal(mean[title[known]], spread[title[known]])
    numpyro.sample("age", ages, obs=age[known])
    logits = intercept + of_age * age[known] + of_title[title[known]]
    numpyro.sample("survived", dist.Bernoulli(logits=logits), obs=survived[known])
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    kind = title[missing]
    drawn = mean[kind][:, None] + spread[kind][:, None] * nodes
    logits = (intercept + of_title[kind])[:, None] + of_age * drawn
    sign = 2 * survived[missing][:, None] - 1
    log_weights = np.log(weights / weights.sum())
    each = nn.logsumexp(nn.log_sigmoid(sign * logits) + log_weights, axis=-1)
    numpyro.factor("missing", each.sum())


def coins() -> tuple[Array, Array, Array]:
    """Draw two coins, the second depending on the first; eight of the first are missing."""
    rng = np.random.default_rng(52)
    first = rng.random(40) < 0.3
    second = rng.random(40) < np.where(first, 0.8, 0.35)
    missing = np.sort(rng.choice(40, 8, replace=False))
    first[missing] = False
    first, missing, second = (x.astype(np.int32) for x in (first, missing, second))
    return first, missing, second


def impute_discrete(first: Array, missing: Array, second: Array) -> None:
    """Sum out the missing coins; those that are known are observed."""
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    chances = numpyro.sample("chances", dist.Beta(jnp.ones(2), jnp.ones(2)).to_event(1))
    known = np.setdiff1d(np.arange(40), missing)
    with numpyro.plate("known", len(known)):
        numpyro.sample("first", dist.Bernoulli(share), obs=first[known])
        numpyro.sample("second", dist.Bernoulli(chances[first[known]]), obs=second[known])
    with numpyro.plate("missing", len(missing)):
        coin = dist.Bernoulli(share)
        drawn = numpyro.sample("drawn", coin, infer={"enumerate": "parallel"})
        numpyro.sample("then", dist.Bernoulli(Vindex(chances)[drawn]), obs=second[missing])


def impute_masked(first: Array, missing: Array, second: Array) -> None:
    """The same by the page's way: draw all coins masked, and observe the filled ones."""
    share = numpyro.sample("share", dist.Beta(1.0, 1.0))
    chances = numpyro.sample("chances", dist.Beta(jnp.ones(2), jnp.ones(2)).to_event(1))
    is_missing = np.isin(np.arange(40), missing)
    with numpyro.plate("row", 40):
        coin = dist.Bernoulli(share).mask(is_missing)
        drawn = numpyro.sample("drawn", coin, infer={"enumerate": "parallel"})
        filled = jnp.where(is_missing, drawn, first)
        numpyro.sample("seen", dist.Bernoulli(share).mask(~is_missing), obs=first)
        numpyro.sample("second", dist.Bernoulli(Vindex(chances)[filled]), obs=second)


def coins_exact(_: dict[str, Any]) -> float:
    """Sum over the missing coins; the chances are integrated out."""
    first, missing, second = coins()
    terms = []
    for drawn in product([0, 1], repeat=len(missing)):
        whole = first.copy()
        whole[missing] = drawn
        yes = whole.sum()
        term = special.betaln(1 + yes, 41 - yes)
        for k in (0, 1):
            then = second[whole == k]
            term += special.betaln(1 + then.sum(), 1 + then.size - then.sum())
        terms.append(term)
    return float(special.logsumexp(terms))


def masked_coins_exact(params: dict[str, Any]) -> float:
    """Add log 2 for each coin that is drawn under a mask: both of its values count."""
    return coins_exact(params) + 32 * float(np.log(2.0))


BY = "quadrature and importance sampling"
ENTRIES = {
    "imputation": Entry(
        impute,
        passengers(),
        AFTER,
        "missing ages",
        by=BY,
        collapsed=(imputed_by_quadrature, passengers()),
        shown="drawn",
    ),
    "imputation_as_printed": Entry(
        impute_as_printed,
        passengers(),
        AFTER,
        "missing ages, normal prior of sds",
        by=BY,
        collapsed=(imputed_by_quadrature, (*passengers(), -2 * np.log(2.0))),
        shown="drawn",
    ),
    "imputation_discrete": Entry(
        impute_discrete,
        coins(),
        PAGES + "tutorials/discrete_imputation.html",
        "missing coins",
        coins_exact,
        "enumeration",
        shown="chances",
    ),
    "imputation_masked": Entry(
        impute_masked,
        coins(),
        PAGES + "tutorials/discrete_imputation.html",
        "missing coins, drawn under a mask",
        masked_coins_exact,
        "enumeration",
        shown="chances",
    ),
}
