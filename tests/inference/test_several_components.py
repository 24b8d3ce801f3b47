"""Groups whose model is not smooth, and groups so large that draws have to follow."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.optimize import minimize
from scipy.stats import laplace, norm, poisson

from numpyro_jala import JALAEM
from numpyro_jala.inference import clouds, estimation
from numpyro_jala.inference.draws import define_draws
from numpyro_jala.inference.information import Information

ANY_INFORMATION = Information(np.zeros(2), np.eye(2), np.stack([np.eye(2)] * 4))
NUM_GROUPS, ROWS = 20, 5
SHAPE = NUM_GROUPS, ROWS


def kinked(y):
    """Laplace noise: its second derivative is zero, but for a kink."""
    mean = numpyro.param("mean", 0.0)
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    numpyro.sample("y", dist.Laplace(mean + u[:, None], noise), obs=y)


def kinked_rows(mean, noise, y, u):
    return laplace.logpdf(y, mean + u, np.exp(noise))


def probit(x, y):
    """A probability of single precision: far out it has no second derivative."""
    mean = numpyro.param("mean", 0.0)
    slope = numpyro.param("slope", 0.0)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", len(x)):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    probability = jax.scipy.stats.norm.cdf(mean + slope * x + u[:, None])
    numpyro.sample("y", dist.Bernoulli(probs=probability), obs=y)


def probit_rows(mean, slope, x, y, u):
    return norm.logcdf((2 * y - 1) * (mean + slope * x + u))


def normal_nodes(num_nodes):
    """Return where to evaluate what is integrated over a standard normal, and weights."""
    nodes, width = np.linspace(-8.0, 8.0, num_nodes, retstep=True)
    return nodes, norm.pdf(nodes) * width


def exact_loss(rows, num_nodes=2_001):
    """Return minus the log-likelihood as a function of params, the last a log sd."""
    nodes, weights = normal_nodes(num_nodes)

    def loss(params):
        *others, spread = params
        logs = rows(*others, np.exp(spread) * nodes[:, None, None]).sum(-1)
        top = logs.max(0)
        return -np.sum(top + np.log(weights @ np.exp(logs - top)))

    return loss


def exact_errors(loss, params, length=0.2):
    """Return the standard errors that the second derivatives at some params give.

    By differences so many standard errors long: a kink is averaged over by the longer ones,
    and of a smooth integrand the shorter ones are the more exact.
    """
    lengths, size = np.full(len(params), 0.02), range(len(params))

    def second(i, j):
        steps = np.diag(lengths)
        ends = [
            loss(params + a * steps[i] + b * steps[j]) for a in (1, -1) for b in (1, -1)
        ]
        return (ends[0] - ends[1] - ends[2] + ends[3]) / (4 * lengths[i] * lengths[j])

    for _ in range(2):
        observed = np.array([[second(i, j) for j in size] for i in size])
        errors = np.sqrt(np.diag(np.linalg.inv(observed)))
        lengths = length * errors
    return errors


def exact_fit(loss, first):
    """Return the maximum of the likelihood, standard errors, and how high it is."""
    options = {"xatol": 1e-5, "fatol": 1e-9}
    best = minimize(loss, first, method="Nelder-Mead", options=options)
    return best.x, exact_errors(loss, best.x), -best.fun


def kinked_case():
    rng = np.random.default_rng(14)
    effect = rng.normal(0.0, 1.0, (NUM_GROUPS, 1))
    y = 1 + effect + 0.6 * rng.laplace(size=SHAPE)
    loss = exact_loss(lambda m, e, u: kinked_rows(m, e, y, u))
    exact = exact_fit(loss, [1.0, -0.5, 0.0])
    return kinked, ("mean", "noise", "spread"), (jnp.asarray(y),), exact


def steep(x, y):
    """Laplace noise, and a param that no latent can follow all the way."""
    slope = numpyro.param("slope", 0.0)
    mean = numpyro.param("mean", 0.0)
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", len(x)):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    numpyro.sample("y", dist.Laplace(mean + slope * x + u[:, None], noise), obs=y)


def steep_case():
    rng = np.random.default_rng(3)
    x = 3.0 * rng.normal(size=(30, 12))
    y = 1 + 0.2 * x + rng.gamma(2.0, 1.0, (30, 1)) + 0.5 * rng.laplace(size=x.shape)
    loss = exact_loss(lambda m, b, e, u: kinked_rows(m + b * x, e, y, u))
    exact = exact_fit(loss, [1.0, 0.2, -0.5, 0.0])
    names = ("mean", "slope", "noise", "spread")
    return steep, names, (jnp.asarray(x), jnp.asarray(y)), exact


def probit_case():
    rng = np.random.default_rng(1)
    # Few rows and a wide spread: some particles are where the derivative is missing.
    x, effect = rng.normal(size=(30, 4)), 3 * rng.normal(size=(30, 1))
    y = (0.5 + 0.8 * x + effect + rng.normal(size=(30, 4)) > 0).astype(int)
    loss = exact_loss(lambda m, b, u: probit_rows(m, b, x, y, u))
    exact = exact_fit(loss, [0.5, 0.8, 1.0])
    return probit, ("mean", "slope", "spread"), (jnp.asarray(x), jnp.asarray(y)), exact


@pytest.mark.parametrize("case", [kinked_case, steep_case, probit_case])
def test_estimates_and_errors_where_second_derivatives_fail(case):
    model, names, data, (best, errors, highest) = case()
    jala = JALAEM(model)
    jala.run(random.key(1), None, *data, progress_bar=False)
    is_log = np.array([name in ("noise", "spread") for name in names])
    found = np.array([float(jala.params[name]) for name in names])
    error = np.array([float(jala.standard_errors()[name]) for name in names])
    error, found = (
        np.where(is_log, error / np.abs(found), error),
        np.where(is_log, np.log(np.abs(found)), found),
    )
    assert np.all(np.abs(found - best) < 0.1 * errors)
    np.testing.assert_allclose(error, errors, rtol=0.05)
    assert abs(jala.log_evidence - highest) < 4 * jala.log_evidence_se + 0.01
    assert jala.diagnostics()["num_steps"] < 500


def two_levels(y):
    """Counts with an effect of the group and one of each row: six latents in a component."""
    mean = numpyro.param("mean", 0.0)
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS, dim=-2):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
        with numpyro.plate("rows", ROWS, dim=-1):
            e = numpyro.sample("e", dist.Normal(0.0, noise))
            numpyro.sample("y", dist.Poisson(jnp.exp(mean + u + e)), obs=y)


def test_errors_of_large_components_are_as_good_as_they_say():
    """A row's noise is hardly told from its Poisson noise: most of its information cancels."""
    rng = np.random.default_rng(8)
    effects = 0.6 * rng.normal(size=(NUM_GROUPS, 1)) + 0.3 * rng.normal(size=SHAPE)
    y = rng.poisson(np.exp(1 + effects))
    nodes, weights = normal_nodes(65)  # smooth integrands: 129 change nothing

    def rows(mean, noise, u):
        rate = np.exp(mean + u[..., None] + np.exp(noise) * nodes)
        return np.log(poisson.pmf(y[..., None], rate) @ weights)

    loss = exact_loss(rows, 129)
    best, errors, highest = exact_fit(loss, [1.0, -1.0, -0.5])
    jala = JALAEM(two_levels)
    jala.run(random.key(1), None, y, progress_bar=False)
    assert jala.components["sizes"].tolist() == [1 + ROWS] * NUM_GROUPS
    params = {name: float(jala.params[name]) for name in ("mean", "noise", "spread")}
    scale = np.array([1.0, params["noise"], params["spread"]])
    found = np.array([params["mean"], *np.log(scale[1:])])
    assert np.all(np.abs(found - best) < 0.05 * errors)
    error = np.array([float(jala.standard_errors()[name]) for name in params]) / scale
    known = jala._run.result.uncertainty.error
    # They are those at the estimate: that of the noise changes by two per cent where the
    # noise is a fortieth of it too high.
    there = exact_errors(loss, found, 0.05)
    np.testing.assert_array_less(np.abs(error / there - 1), 4 * known + 0.001)
    assert (known < 0.01).all()
    assert abs(jala.log_evidence - highest) < 4 * jala.log_evidence_se + 0.005


def test_no_more_clouds_are_asked_for_than_it_takes(monkeypatch):
    errors, asked = iter([0.03, 0.02, 0.005, 0.001]), []
    run = SimpleNamespace(
        fixed=SimpleNamespace(settings=SimpleNamespace(num_islands=4)),
        uncertainty=lambda _: SimpleNamespace(error=np.array([0.0, next(errors)])),
    )
    monkeypatch.setattr(clouds, "average", lambda *_: SimpleNamespace(motion=None))
    monkeypatch.setattr(clouds.information, "combine", lambda _: ANY_INFORMATION)
    several = (asked.append(index) or index for index in range(1, 9))
    clouds.inform(run, None, several, 0.01)
    assert asked == [1, 2, 3]


def test_fewer_draws_are_the_first_ones_in_the_same_program():
    y = np.random.default_rng(2).laplace(1.0, 1.0, SHAPE).astype(np.float32)
    jala = JALAEM(kinked)
    jala.run(random.key(0), 5, y, progress_bar=False)
    run, state = jala._run, jala.last_state
    params = state.target.params
    here = clouds.keep(run, state, params)
    given = run.fixed, random.key(1)
    many, few = (
        define_draws(*given, count, here.gaussian, here.level, params) for count in (64, 16)
    )
    before = estimation.score.num_compiled
    found, part, expected = (
        estimation.score(run.fixed, run.placed, params, draws)
        for draws in (many, many.fewer(16), few)
    )
    assert estimation.score.num_compiled == before + 2
    np.testing.assert_allclose(part.score, expected.score, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(part.log_evidence, expected.log_evidence, atol=1e-5)
    assert np.abs(np.asarray(found.log_evidence - part.log_evidence)).max() > 1e-3


#: Rows of each group.
UNEQUAL = np.array([1, 3, 10, 40, 200, 500, 1_000, 3_000])


def large(group, y):
    """Latents that move by many of their standard deviations if the mean moves by its own."""
    mean = numpyro.param("mean", 0.0)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", len(UNEQUAL)):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mean + spread * u[group], 2.0), obs=y)


def large_data():
    rng = np.random.default_rng(5)
    group = np.repeat(np.arange(len(UNEQUAL)), UNEQUAL)
    effect = rng.gamma(2.0, 1.0, len(UNEQUAL))
    y = 1.0 + effect[group] + 2.0 * rng.normal(size=group.size)
    return group, y.astype(np.float32)


def test_draws_follow_the_params_where_groups_are_large():
    group, y = large_data()
    jala = JALAEM(large)
    jala.run(random.key(0), None, group, y, progress_bar=False)
    means = np.bincount(group, y) / UNEQUAL
    within = norm.logpdf(y, means[group], 2.0).sum()
    within += np.sum(0.5 * np.log(2 * np.pi * 4.0 / UNEQUAL))

    def loss(params):
        sd = np.sqrt(np.exp(2 * params[1]) + 4.0 / UNEQUAL)
        return -norm.logpdf(means, params[0], sd).sum() - within

    best = minimize(loss, [1.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-6})
    found = [float(jala.params["mean"]), np.log(float(jala.params["spread"]))]
    error = jala.standard_errors()
    error = np.array([error["mean"], error["spread"] / jala.params["spread"]])
    assert np.all(np.abs(found - best.x) < 0.03 * error)
    assert abs(jala.log_evidence + best.fun) < 4 * jala.log_evidence_se + 0.01

    run, state, params = jala._run, jala.last_state, jala.last_state.target.params
    here = clouds.keep(run, state, params)
    motion = clouds.inform(run, params, here.clouds[:1]).motion
    known = jala.params["spread"] * UNEQUAL / 4.0
    expected = -known / (1 + known * jala.params["spread"])
    np.testing.assert_allclose(motion[0], expected, rtol=0.02)
    proposal = run.fixed, random.key(1), 512, here.gaussian, here.level, params
    away = params + jnp.asarray([0.5 * error[0], 0.0], params.dtype)
    follow, stand = (
        estimation.score(run.fixed, run.placed, away, define_draws(*proposal, m))
        for m in (motion, None)
    )
    assert follow.ess > 0.5 and stand.ess < 0.1
