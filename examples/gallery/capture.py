"""Survival of marked animals, after NumPyro's example ``capture_recapture``.

The models are those of Cormack, Jolly and Seber: after its first capture an animal lives on
to the next year with some chance, and is seen again, if it lives, with another. Whether an
animal lives is summed out. As on the page, the state of an animal is masked before its
first capture; a masked draw has no prior, so the sum counts both of its values as one:
each year before and with the first capture multiplies the density by two, and the year of
the first capture lets the animal be dead already. ``capture_1_unmasked`` masks nothing but
what is seen, and is the model of the textbooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64
from jax.scipy.special import expit, logit
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import LocScaleReparam

AFTER = PAGES + "examples/capture_recapture.html"


def captures(num_animals: int = 60, num_years: int = 5) -> tuple[Array, Array]:
    """Draw histories of capture, and the sex of each animal."""
    rng = np.random.default_rng(3)
    seen = np.zeros((num_animals, num_years))
    male = rng.random(num_animals) < 0.5
    for animal, first in enumerate(rng.integers(0, num_years - 1, num_animals)):
        alive = True
        seen[animal, first] = 1
        for year in range(first + 1, num_years):
            alive = alive and rng.random() < (0.75 if male[animal] else 0.6)
            seen[animal, year] = alive and rng.random() < 0.8
    histories, sex = float32(seen, male)
    return histories, sex


def follow(
    histories: Array,
    recapture: Any,
    survival_fn: Callable[[], Any],
    mask_state: bool = True,
) -> None:
    """Scan over the years; ``survival_fn`` gives the chance to live on, each year anew."""
    num_animals = histories.shape[0]

    def year(carry: Any, seen: Any) -> Any:
        marked, alive = carry
        chance = survival_fn()
        with numpyro.plate("animal", num_animals, dim=-1):
            with handlers.mask(mask=marked | (not mask_state)):
                lives = jnp.where(marked, chance * alive, 1.0)
                lives = dist.util.clamp_probs(lives)
                infer = {"enumerate": "parallel"}
                alive = numpyro.sample("alive", dist.Bernoulli(lives), infer=infer)
            with handlers.mask(mask=marked):
                again = dist.util.clamp_probs(recapture * alive)
                numpyro.sample("seen", dist.Bernoulli(again), obs=seen)
        return (marked | (seen > 0), alive), None

    first = histories[:, 0] > 0
    scan(year, (first, jnp.ones(num_animals, int)), histories[:, 1:].T)


def chance(name: str) -> Any:
    """Sample a chance of which nothing is known."""
    return numpyro.sample(name, dist.Uniform(0.0, 1.0))


def model_1(histories: Array, male: Array) -> None:
    """One chance to survive, and one to be seen again."""
    survival = chance("survival")
    follow(histories, chance("recapture"), lambda: survival)


def model_1_unmasked(histories: Array, male: Array) -> None:
    """The same, with animals that live for sure until their first capture."""
    survival = chance("survival")
    follow(histories, chance("recapture"), lambda: survival, mask_state=False)


def model_2(histories: Array, male: Array) -> None:
    """Let survival differ between years."""
    follow(histories, chance("recapture"), lambda: chance("survival"))


def model_3(histories: Array, male: Array) -> None:
    """Let survival differ between years by random effects."""
    mean = logit(chance("mean"))
    spread = numpyro.sample("spread", dist.Uniform(0.0, 10.0))

    def survival() -> Any:
        with handlers.reparam(config={"effect": LocScaleReparam(0)}):
            return expit(numpyro.sample("effect", dist.Normal(mean, spread)))

    follow(histories, chance("recapture"), survival)


def model_4(histories: Array, male: Array) -> None:
    """Let survival differ between the sexes."""
    survival = jnp.where(male > 0, chance("survival_male"), chance("survival_female"))
    follow(histories, chance("recapture"), lambda: survival)


def model_5(histories: Array, male: Array) -> None:
    """Let survival differ between the sexes and between years."""
    effect = male * numpyro.sample("effect_of_sex", dist.Normal(0.0, 10.0))

    def survival() -> Any:
        level = numpyro.sample("effect_of_year", dist.Normal(0.0, 10.0))
        return expit(level + effect)

    follow(histories, chance("recapture"), survival)


def log_likelihood(
    histories: Array, survival: Array, recapture: Array, is_masked: bool = True
) -> Array:
    """Sum over the states of each animal by hand.

    ``survival`` has a row per point, and in it a chance for each animal and year;
    ``recapture`` has one per point. See the head of this file for ``is_masked``.
    """
    total = np.zeros(len(recapture))
    for animal, seen in enumerate(histories):
        first = int(np.argmax(seen > 0))
        alive, dead = np.ones(len(recapture)), np.zeros(len(recapture))
        if is_masked and first > 0:
            total += first * np.log(2) - np.log(2)
            dead = np.ones(len(recapture))
        for year in range(first + 1, seen.size):
            lives = survival[:, animal, year - 1]
            alive, dead = alive * lives, dead + alive * (1 - lives)
            alive = alive * (recapture if seen[year] else 1 - recapture)
            dead = dead * (0.0 if seen[year] else 1.0)
        total += np.log(alive + dead)
    return total


def exact_1(_: dict[str, Any], is_masked: bool = True) -> float:
    """Integrate over both chances."""
    histories = captures()[0]
    shape = 1, *(np.array(histories.shape) - [0, 1])

    def log_density(survival: Array, recapture: Array) -> Array:
        given = survival[:, None, None] * np.ones(shape)
        return log_likelihood(histories, given, recapture, is_masked)

    return box(log_density, [(0.0, 1.0)] * 2, num_nodes=80)


def exact_4(_: dict[str, Any]) -> float:
    """Integrate over three chances."""
    histories, male = float64(*captures())

    def log_density(of_male: Array, of_female: Array, recapture: Array) -> Array:
        given = np.where(male > 0, of_male[:, None], of_female[:, None])
        years = histories.shape[1] - 1
        given = np.repeat(given[..., None], years, -1)
        return log_likelihood(histories, given, recapture)

    return box(log_density, [(0.0, 1.0)] * 3, num_nodes=40)


def exact_2(_: dict[str, Any]) -> float:
    """Integrate over the chances of four years, and that of being seen."""
    histories = captures()[0]
    different, counts = np.unique(histories, axis=0, return_counts=True)

    def log_density(*chances: Array) -> Array:
        *survival, recapture = chances
        given = np.stack(survival, -1)[:, None, :] * np.ones((1, len(different), 1))
        parts = [
            counts[i] * log_likelihood(different[i : i + 1], given[:, i : i + 1], recapture)
            for i in range(len(different))
        ]
        return np.sum(parts, axis=0)

    return box(log_density, [(0.0, 1.0)] * 5, num_nodes=14)


DATA = captures()
INTEGRATED = "importance sampling from draws of NUTS"
ENTRIES = {
    "capture_1": Entry(
        model_1,
        DATA,
        AFTER,
        "survival and recapture",
        exact_1,
        "quadrature",
        shown="survival",
    ),
    "capture_1_unmasked": Entry(
        model_1_unmasked,
        DATA,
        AFTER,
        "the same, animals alive until seen",
        lambda params: exact_1(params, is_masked=False),
        "quadrature",
        shown="survival",
    ),
    "capture_2": Entry(
        model_2, DATA, AFTER, "survival by year", exact_2, "quadrature", shown="survival"
    ),
    "capture_3": Entry(
        model_3, DATA, AFTER, "random effects of years", by=INTEGRATED, shown="spread"
    ),
    "capture_4": Entry(
        model_4,
        DATA,
        AFTER,
        "survival by sex",
        exact_4,
        "quadrature",
        shown="survival_male",
    ),
    "capture_5": Entry(
        model_5,
        DATA,
        AFTER,
        "survival by sex and year",
        by=INTEGRATED,
        shown="effect_of_sex",
    ),
}
