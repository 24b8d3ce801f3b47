"""Groups within groups, after NumPyro's examples and tutorials."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box, float32, float64, log_half_cauchy
from jax import nn
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.reparam import LocScaleReparam
from scipy import special, stats

INTEGRATED = "importance sampling from draws of NUTS"
BRIDGED = "bridge from draws of NUTS"
SCHOOLS = float32([15, 10, 16, 11, 9, 11, 10, 18], [28, 8, -3, 7, -1, 1, 18, 12])
#: Applications to Berkeley in 1973 and those admitted, by department, men before women
#: (Bickel, Hammel and O'Connell 1975).
APPLIED = [825, 108, 560, 25, 325, 593, 417, 375, 191, 393, 373, 341]
ADMITTED = [512, 89, 353, 17, 120, 202, 138, 131, 53, 94, 22, 24]


def eight_schools(scale: Array, y: Array) -> None:
    """Pool the effects of coaching in eight schools."""
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = numpyro.sample("spread", dist.HalfCauchy(5.0))
    with numpyro.plate("school", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        numpyro.sample("y", dist.Normal(effect, scale), obs=y)


#: The same in units of the spread, as the guide advises.
eight_schools_non_centred = handlers.reparam(
    eight_schools, config={"effect": LocScaleReparam(0)}
)


def eight_schools_exact(_: dict[str, Any]) -> float:
    """Integrate over the spread; given it, the data are normal."""
    scale, y = float64(*SCHOOLS)

    def log_density(log_spread: Array) -> Array:
        given = [
            stats.multivariate_normal(cov=np.diag(scale**2 + tau**2) + 25.0).logpdf(y)
            for tau in np.exp(log_spread)
        ]
        return np.array(given) + log_half_cauchy(log_spread, 5.0)

    return box(log_density, [(-14.0, 8.0)], num_nodes=300)


def admissions(department: Array, male: Array, applied: Array, admitted: Array) -> None:
    """Let departments differ in level and in the effect of sex, correlated."""
    centre = numpyro.sample("centre", dist.Normal(0.0, jnp.array([4.0, 1.0])))
    scale = numpyro.sample("scale", dist.HalfNormal(jnp.ones(2)))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, concentration=2))
    z = numpyro.sample("z", dist.Normal(jnp.zeros((6, 2)), 1.0))
    effects = centre + z @ (scale[..., None] * correlation).T
    logits = effects[department, 0] + effects[department, 1] * male
    numpyro.sample("admitted", dist.Binomial(applied, logits=logits), obs=admitted)


def admissions_data() -> tuple[Array, ...]:
    """Return the six departments, by sex."""
    department = np.repeat(np.arange(6), 2).astype(np.int32)
    return department, *float32(np.tile([1, 0], 6), APPLIED, ADMITTED)


def lung_data() -> tuple[Array, Array, Array]:
    """Draw lung capacities of eight patients at six visits, in hundreds."""
    rng = np.random.default_rng(31)
    patient = np.repeat(np.arange(8), 6)
    week = rng.uniform(0, 4, 48)
    level, slope = rng.normal(25, 4, 8), rng.normal(-1.0, 0.5, 8)
    y = level[patient] + slope[patient] * week + rng.normal(0, 1.0, 48)
    return patient.astype(np.int32), *float32(week, y)


def lung_scales() -> tuple[Any, ...]:
    """Sample means and scales of patients, and the noise."""
    level = numpyro.sample("level", dist.Normal(0.0, 30.0))
    level_scale = numpyro.sample("level_scale", dist.HalfNormal(10.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 3.0))
    slope_scale = numpyro.sample("slope_scale", dist.HalfNormal(3.0))
    return level, level_scale, slope, slope_scale


def lung(patient: Array, week: Array, y: Array) -> None:
    """Give each patient a line."""
    level, level_scale, slope, slope_scale = lung_scales()
    with numpyro.plate("patient", 8):
        levels = numpyro.sample("levels", dist.Normal(level, level_scale))
        slopes = numpyro.sample("slopes", dist.Normal(slope, slope_scale))
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    mean = levels[patient] + slopes[patient] * week
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def lung_collapsed(patient: Array, week: Array, y: Array) -> None:
    """Integrate the lines."""
    level, level_scale, slope, slope_scale = lung_scales()
    noise = numpyro.sample("noise", dist.HalfNormal(10.0))
    same = np.equal.outer(patient, patient)
    between = level_scale**2 + slope_scale**2 * np.multiply.outer(week, week)
    covariance = same * between + noise**2 * jnp.eye(len(y))
    numpyro.sample("y", dist.MultivariateNormal(level + slope * week, covariance), obs=y)


def answers_data() -> Array:
    """Draw the answers of 40 people to five questions."""
    rng = np.random.default_rng(32)
    eta = rng.normal(size=(40, 1)) * [0.8, 1.0, 1.2, 1.5, 0.6] + [-1.0, -0.5, 0.0, 0.5, 1.0]
    return float32(rng.random((40, 5)) < special.expit(eta))[0]


def item_response(y: Array) -> None:
    """Abilities of people, and how hard and how sharp the questions are."""
    with numpyro.plate("question", 5):
        ease = numpyro.sample("ease", dist.Normal(0.0, 1.5))
        sharpness = numpyro.sample("sharpness", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("person", y.shape[0]):
        ability = numpyro.sample("ability", dist.Normal())
    logits = sharpness * ability[:, None] + ease
    numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(2), obs=y)


def item_response_collapsed(y: Array) -> None:
    """Integrate the abilities by quadrature."""
    with numpyro.plate("question", 5):
        ease = numpyro.sample("ease", dist.Normal(0.0, 1.5))
        sharpness = numpyro.sample("sharpness", dist.LogNormal(0.0, 0.5))
    nodes, width = np.linspace(-7.0, 7.0, 71, retstep=True)
    logits = nodes[:, None] * sharpness + ease
    log_prior = stats.norm.logpdf(nodes) + np.log(width)
    each = y @ nn.log_sigmoid(logits).T + (1 - y) @ nn.log_sigmoid(-logits).T
    numpyro.factor("y", nn.logsumexp(each + log_prior, axis=-1).sum())


def item_response_params(y: Array) -> None:
    """The same with the questions as params, as in marginal maximum likelihood."""
    ease = numpyro.param("ease", jnp.zeros(5))
    sharpness = numpyro.param("sharpness", jnp.ones(5), constraint=constraints.positive)
    with numpyro.plate("person", y.shape[0]):
        ability = numpyro.sample("ability", dist.Normal())
        logits = sharpness * ability[:, None] + ease
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def item_response_exact(params: dict[str, Any]) -> float:
    """Integrate the abilities by quadrature, at the params."""
    y, ease, sharpness = float64(answers_data(), params["ease"], params["sharpness"])
    nodes, width = np.linspace(-8.0, 8.0, 201, retstep=True)
    eta = nodes[:, None] * sharpness + ease
    each = y @ special.log_expit(eta).T + (1 - y) @ special.log_expit(-eta).T
    log_prior = stats.norm.logpdf(nodes) + np.log(width)
    return float(special.logsumexp(each + log_prior, axis=-1).sum())


def deaths_data() -> tuple[Array, ...]:
    """Draw deaths by age, place and year."""
    rng = np.random.default_rng(33)
    age, place, year = (each.ravel() for each in np.indices((3, 4, 3)))
    logits = -4.0 + 0.8 * age - 0.05 * age * year + 0.3 * rng.normal(size=4)[place]
    people = rng.integers(200, 600, age.size)
    deaths = rng.binomial(people, special.expit(logits))
    return *(each.astype(np.int32) for each in (age, place, year)), *float32(people, deaths)


MORTALITY_SITES = ("of_region", "of_place", "age_steps", "trend_steps", "year_steps")


@handlers.reparam(config={name: LocScaleReparam(0) for name in MORTALITY_SITES})
def mortality(age: Array, place: Array, year: Array, people: Array, deaths: Array) -> None:
    """Random walks over ages and years, and places within regions."""
    region_scale = numpyro.sample("region_scale", dist.HalfNormal(1.0))
    place_scale = numpyro.sample("place_scale", dist.HalfNormal(1.0))
    age_scale = numpyro.sample("age_scale", dist.HalfNormal(1.0))
    trend_scale = numpyro.sample("trend_scale", dist.HalfNormal(1.0))
    year_scale = numpyro.sample("year_scale", dist.HalfNormal(1.0))
    with numpyro.plate("region", 2):
        of_region = numpyro.sample("of_region", dist.Normal(0.0, region_scale))
    with numpyro.plate("place", 4):
        mean = of_region[jnp.array([0, 0, 1, 1])]
        of_place = numpyro.sample("of_place", dist.Normal(mean, place_scale))
    with numpyro.plate("age", 3):
        scales = jnp.append(jnp.full(1, 10.0), jnp.full(2, age_scale))
        age_steps = numpyro.sample("age_steps", dist.Normal(0.0, scales))
        scales = jnp.append(jnp.full(1, 10.0), jnp.full(2, trend_scale))
        trend_steps = numpyro.sample("trend_steps", dist.Normal(0.0, scales))
    with numpyro.plate("year", 2):
        year_steps = numpyro.sample("year_steps", dist.Normal(0.0, year_scale))
    of_year = jnp.append(jnp.zeros(1), jnp.cumsum(year_steps))
    logits = jnp.cumsum(age_steps)[age] + jnp.cumsum(trend_steps)[age] * year
    logits = logits + of_place[place] + of_year[year]
    numpyro.sample("deaths", dist.Binomial(people, logits=logits), obs=deaths)


ENTRIES = {
    "eight_schools": Entry(
        eight_schools,
        SCHOOLS,
        PAGES + "getting_started.html",
        "eight schools, centred",
        eight_schools_exact,
        "closed form and quadrature",
        shown="spread",
    ),
    "eight_schools_non_centred": Entry(
        eight_schools_non_centred,
        SCHOOLS,
        PAGES + "getting_started.html",
        "eight schools, not centred",
        eight_schools_exact,
        "closed form and quadrature",
        shown="spread",
    ),
    "ucbadmit": Entry(
        admissions,
        admissions_data(),
        PAGES + "examples/ucbadmit.html",
        "admissions, correlated effects",
        by=BRIDGED,
        shown="scale",
    ),
    "hierarchical_regression": Entry(
        lung,
        lung_data(),
        PAGES + "tutorials/bayesian_hierarchical_linear_regression.html",
        "a line for each patient",
        by="closed form and importance sampling",
        collapsed=(lung_collapsed, lung_data()),
        shown="slope_scale",
    ),
    "item_response": Entry(
        item_response,
        (answers_data(),),
        PAGES,
        "item response, all latent",
        by="quadrature and importance sampling",
        collapsed=(item_response_collapsed, (answers_data(),)),
        shown="sharpness",
    ),
    "item_response_params": Entry(
        item_response_params,
        (answers_data(),),
        PAGES,
        "item response, questions as params",
        item_response_exact,
        "quadrature",
        shown="ability",
        num_steps=100,
    ),
    "mortality": Entry(
        mortality,
        deaths_data(),
        PAGES + "examples/mortality.html",
        "deaths by age, place and year",
        by=BRIDGED,
        shown="place_scale",
    ),
}
