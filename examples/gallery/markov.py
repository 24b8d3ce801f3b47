"""Hidden Markov models, after NumPyro's examples ``hmm`` and ``hmm_enum``."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry
from jax import lax, nn
from numpyro.contrib.control_flow import scan
from numpyro.ops.indexing import Vindex
from scipy import special


def tones(num_times: int = 11, num_tones: int = 3) -> Array:
    """Draw a short piece with two moods."""
    rng = np.random.default_rng(7)
    mood = np.repeat([0, 1, 0], [4, 4, num_times - 8])
    chance = np.array([[0.9, 0.1, 0.2], [0.1, 0.8, 0.3]])
    return (rng.random((num_times, num_tones)) < chance[mood]).astype(np.int32)


def notes(music: Array) -> None:
    """Two hidden states, which stay for a while, and tones that depend on them."""
    change = dist.Dirichlet(0.9 * jnp.eye(2) + 0.1).to_event(1)
    moves = numpyro.sample("moves", change)
    plays = dist.Beta(0.1, 0.9).expand([2, music.shape[1]]).to_event(2)
    chances = numpyro.sample("chances", plays)

    def step(state: Any, tones: Any) -> Any:
        state = numpyro.sample(
            "state", dist.Categorical(moves[state]), infer={"enumerate": "parallel"}
        )
        with numpyro.plate("tone", music.shape[1], dim=-1) as tone:
            heard = dist.Bernoulli(Vindex(chances)[state, tone])
            numpyro.sample("tones", heard, obs=tones)
        return state, None

    scan(step, 0, music)


def notes_exact(_: dict[str, Any]) -> float:
    """Sum over all paths of the hidden state, each in closed form."""
    music, terms = tones(), []
    concentration = 0.9 * np.eye(2) + 0.1
    for path in product([0, 1], repeat=len(music)):
        counts = np.zeros((2, 2))
        np.add.at(counts, ((0, *path[:-1]), path), 1)
        term = sum(
            special.betaln(*(concentration[k] + counts[k]))
            - special.betaln(*concentration[k])
            for k in (0, 1)
        )
        for k in (0, 1):
            heard = music[np.equal(path, k)]
            yes = heard.sum(0)
            term += np.sum(
                special.betaln(0.1 + yes, 0.9 + len(heard) - yes) - special.betaln(0.1, 0.9)
            )
        terms.append(term)
    return float(special.logsumexp(terms))


def words() -> tuple[Array, Array, Array]:
    """Draw categories and words: 40 of them labelled, then nine words without labels."""
    rng = np.random.default_rng(8)
    moves = np.array([[0.7, 0.3], [0.4, 0.6]])
    chances = np.array([[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]])
    state, states, said = 0, [], []
    for _ in range(49):
        state = rng.choice(2, p=moves[state])
        states.append(state)
        said.append(rng.choice(3, p=chances[state]))
    return tuple(np.array(x, np.int32) for x in (states[:40], said[:40], said[40:]))


def semi_supervised(states: Array, known: Array, unknown: Array) -> None:
    """Learn from labelled words and from others, whose states are summed out forwards."""
    with numpyro.plate("state", 2):
        moves = numpyro.sample("moves", dist.Dirichlet(jnp.ones(2)))
        chances = numpyro.sample("chances", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("states", dist.Categorical(moves[states[:-1]]), obs=states[1:])
    numpyro.sample("known", dist.Categorical(chances[states]), obs=known)

    def step(log_mass: Any, word: Any) -> Any:
        spread = nn.logsumexp(log_mass[:, None] + jnp.log(moves), axis=0)
        return spread + jnp.log(chances[:, word]), None

    first = jnp.where(jnp.arange(2) == states[-1], 0.0, -jnp.inf)
    last, _ = lax.scan(step, first, jnp.asarray(unknown))
    numpyro.factor("unknown", nn.logsumexp(last))


def semi_supervised_exact(_: dict[str, Any]) -> float:
    """Sum over the states of the words without labels."""
    states, known, unknown = words()
    terms = []
    for path in product([0, 1], repeat=len(unknown)):
        whole, said = np.r_[states, path], np.r_[known, unknown]
        moves, says = np.ones((2, 2)), np.ones((2, 3))
        np.add.at(moves, (whole[:-1], whole[1:]), 1)
        np.add.at(says, (whole, said), 1)
        terms.append(
            sum(log_dirichlet(counts) for counts in moves)
            + sum(log_dirichlet(counts) for counts in says)
        )
    constant = 2 * log_dirichlet(np.ones(2)) + 2 * log_dirichlet(np.ones(3))
    return float(special.logsumexp(terms) - constant)


def log_dirichlet(concentration: Array) -> float:
    """Compute the log-normaliser of a Dirichlet distribution."""
    return float(
        special.gammaln(concentration).sum() - special.gammaln(concentration.sum())
    )


ENTRIES = {
    "hidden_markov_tones": Entry(
        notes,
        (tones(),),
        PAGES + "examples/hmm_enum.html",
        "hidden states behind three tones",
        notes_exact,
        "enumeration",
        shown="chances",
    ),
    "hidden_markov_words": Entry(
        semi_supervised,
        words(),
        PAGES + "examples/hmm.html",
        "words with and without labels",
        semi_supervised_exact,
        "enumeration",
        shown="chances",
    ),
}
