"""Items rated by several people, after NumPyro's example ``annotation``.

The data are small enough to sum over the classes of all items: twelve items of two classes,
rated by three people, the first of them twice.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry
from jax import nn
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from numpyro.ops.indexing import Vindex
from scipy import special

AFTER = PAGES + "examples/annotation.html"
INTEGRATED = "importance sampling from draws of NUTS"
WHO = np.array([0, 0, 1, 2], np.int32)


def ratings(num_items: int = 12) -> Array:
    """Draw ratings, right in four cases of five."""
    rng = np.random.default_rng(5)
    truth = rng.random(num_items) < 0.6
    right = rng.random((num_items, WHO.size)) < 0.8
    return np.where(right, truth[:, None], ~truth[:, None]).astype(np.int32)


def one_rater(given: Array) -> None:
    """Take all ratings as those of one person (multinomial)."""
    with numpyro.plate("class", 2):
        rates = numpyro.sample("rates", dist.Dirichlet(jnp.ones(2)))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("item", given.shape[0], dim=-2):
        truth = numpyro.sample(
            "truth", dist.Categorical(shares), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("rating", given.shape[1]):
            numpyro.sample("given", dist.Categorical(rates[truth]), obs=given)


def dawid_skene(who: Array, given: Array) -> None:
    """Give each person a table of errors."""
    with numpyro.plate("person", 3, dim=-2), numpyro.plate("class", 2):
        rates = numpyro.sample("rates", dist.Dirichlet(jnp.ones(2)))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("item", given.shape[0], dim=-2):
        truth = numpyro.sample(
            "truth", dist.Categorical(shares), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("rating", given.shape[1]):
            chances = Vindex(rates)[who, truth, :]
            numpyro.sample("given", dist.Categorical(chances), obs=given)


def mace(who: Array, given: Array) -> None:
    """Let each person guess now and then, by habits of their own."""
    with numpyro.plate("person", 3):
        habits = numpyro.sample("habits", dist.Dirichlet(jnp.full(2, 10.0)))
        honest = numpyro.sample("honest", dist.Beta(0.5, 0.5))
    with numpyro.plate("item", given.shape[0], dim=-2):
        truth = numpyro.sample(
            "truth", dist.DiscreteUniform(0, 1), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("rating", given.shape[1]):
            guesses = dist.Bernoulli(1 - honest[who])
            guess = numpyro.sample("guess", guesses, infer={"enumerate": "parallel"})
            sure = nn.one_hot(truth, 2)
            chances = jnp.where(guess[..., None] == 0, sure, habits[who])
            numpyro.sample("given", dist.Categorical(chances), obs=given)


def hierarchical(who: Array, given: Array) -> None:
    """Draw the people's tables of errors from a common distribution."""
    with numpyro.plate("class", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("person", 3, dim=-2), numpyro.plate("class", 2):
        with handlers.reparam(config={"level": LocScaleReparam(0)}):
            level = numpyro.sample("level", dist.Normal(mean, spread))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("item", given.shape[0], dim=-2):
        truth = numpyro.sample(
            "truth", dist.Categorical(shares), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("rating", given.shape[1]):
            logits = Vindex(level)[who, truth]
            numpyro.sample("given", dist.Bernoulli(logits=-logits), obs=given)


def item_difficulty(given: Array) -> None:
    """Let items differ in how clearly they are of their class."""
    with numpyro.plate("class", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("item", given.shape[0], dim=-2):
        truth = numpyro.sample(
            "truth", dist.Categorical(shares), infer={"enumerate": "parallel"}
        )
        with handlers.reparam(config={"level": LocScaleReparam(0)}):
            level = numpyro.sample("level", dist.Normal(mean[truth], spread[truth]))
        with numpyro.plate("rating", given.shape[1]):
            numpyro.sample("given", dist.Bernoulli(logits=-level), obs=given)


def item_difficulty_summed(given: Array) -> None:
    """Sum over the classes by hand; the levels stay, in units of their scale."""
    with numpyro.plate("class", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("item", given.shape[0]):
        z = numpyro.sample("z", dist.Normal())
    logits = (mean + spread * z[:, None])[:, None, :]
    each = dist.Bernoulli(logits=-logits).log_prob(given[..., None]).sum(1)
    numpyro.factor("given", nn.logsumexp(each + jnp.log(shares), axis=-1).sum())


def tables_log_density(given: Array, person: Array) -> float:
    """Sum over all classes; chances of people and classes are integrated out."""
    terms = []
    for truth in product([0, 1], repeat=len(given)):
        size = np.sum(truth)
        term = special.betaln(1 + size, 1 + len(given) - size)
        for one in np.unique(person):
            for kind in (0, 1):
                said = given[np.equal(truth, kind)][:, person == one]
                term += special.betaln(1 + said.sum(), 1 + said.size - said.sum())
        terms.append(term)
    return float(special.logsumexp(terms))


def one_rater_exact(_: dict[str, Any]) -> float:
    """Sum over the classes of all items, for one table."""
    return tables_log_density(ratings(), np.zeros(WHO.size))


def dawid_skene_exact(_: dict[str, Any]) -> float:
    """Sum over the classes of all items, for three tables."""
    return tables_log_density(ratings(), WHO)


ENTRIES = {
    "annotation_multinomial": Entry(
        one_rater,
        (ratings(),),
        AFTER,
        "ratings, one table of errors",
        one_rater_exact,
        "enumeration",
        shown="rates",
    ),
    "annotation_dawid_skene": Entry(
        dawid_skene,
        (WHO, ratings()),
        AFTER,
        "ratings, a table of errors for each",
        dawid_skene_exact,
        "enumeration",
        shown="shares",
    ),
    "annotation_mace": Entry(
        mace,
        (WHO, ratings()),
        AFTER,
        "ratings, some are guesses",
        by=INTEGRATED,
        shown="honest",
    ),
    "annotation_hierarchical": Entry(
        hierarchical,
        (WHO, ratings()),
        AFTER,
        "ratings, pooled tables of errors",
        by=INTEGRATED,
        shown="spread",
    ),
    "annotation_difficulty": Entry(
        item_difficulty,
        (ratings(),),
        AFTER,
        "ratings of items of different difficulty",
        by=INTEGRATED,
        collapsed=(item_difficulty_summed, (ratings(),)),
        shown="spread",
    ),
}
