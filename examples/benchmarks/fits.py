"""Models with params whose marginal likelihood and its maximum are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from fused import PRIOR_VARIANCE
from numpyro.distributions import constraints
from problems import Params, glmm, log_poisson, wisconsin
from quadrature import Array, approximate, float32, float64, integrate_groups
from scipy import optimize, special, stats

from numpyro_jala import datasets

NUM_SUBJECTS = 18
FAR_START = {
    "beta": np.zeros(2, np.float32),
    "tau": np.ones(2, np.float32),
    "sigma": np.float32(1.0),
    "L": np.eye(2, dtype=np.float32),
}


class Fit(NamedTuple):
    """A model with params, its data, its marginal log-likelihood and the maximum."""

    model: Callable[..., None]
    args: tuple[Array, ...]
    log_likelihood_fn: Callable[[Params], float]
    maximum: float


def sleepstudy_model(subject: Array, days: Array, reaction: Array) -> None:
    """Give each subject an intercept and a slope, correlated."""
    beta = numpyro.param("beta", jnp.array([200.0, 0.0]))
    tau = numpyro.param("tau", jnp.array([30.0, 10.0]), constraint=constraints.positive)
    sigma = numpyro.param("sigma", 50.0, constraint=constraints.positive)
    corr = numpyro.param("L", jnp.eye(2), constraint=constraints.corr_cholesky)
    with numpyro.plate("subject", NUM_SUBJECTS):
        prior = dist.MultivariateNormal(beta, scale_tril=tau[:, None] * corr)
        u = numpyro.sample("u", prior)
    with numpyro.plate("row", len(days)):
        mean = u[subject, 0] + u[subject, 1] * days
        numpyro.sample("y", dist.Normal(mean, sigma), obs=reaction)


def sleepstudy_data() -> tuple[Array, ...]:
    """Read the subject's index, the day and the reaction time in milliseconds."""
    data = datasets.load_sleepstudy()
    return data.subject.astype(np.int32), *float32(data.days, data.reaction)


def sleepstudy() -> Fit:
    """Fit a random slope; the marginal is Gaussian, and lme4 gives the maximum."""
    data = sleepstudy_data()
    subject, days, reaction = data[0], *float64(*data[1:])
    groups = [subject == index for index in range(NUM_SUBJECTS)]

    def log_likelihood(params: Params) -> float:
        beta, tau, corr = float64(params["beta"], params["tau"], params["L"])
        noise = float(params["sigma"]) ** 2 * np.eye(10)
        root, total = tau[:, None] * corr, 0.0
        for rows in groups:
            z = np.stack([np.ones(rows.sum()), days[rows]], 1)
            covariance = z @ root @ root.T @ z.T + noise
            marginal = stats.multivariate_normal(z @ beta, covariance)
            total += float(marginal.logpdf(reaction[rows]))
        return total

    return Fit(sleepstudy_model, data, log_likelihood, -875.96967)


def bernoulli_model(x: Array, y: Array) -> None:
    """Give each group, one row of the data, a normal effect on the logit scale."""
    b = numpyro.param("b", jnp.zeros(2))
    sd = numpyro.param("sd", 1.0, constraint=constraints.positive)
    with numpyro.plate("group", y.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
        with numpyro.plate("row", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x + u), obs=y)


def bernoulli_data() -> tuple[Array, ...]:
    """Simulate 300 groups of 6 binary rows, with effects of sd 4: few say much."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 6))
    logits = -0.5 + x + 4.0 * rng.normal(size=(300, 1))
    return float32(x, rng.random(x.shape) < 1 / (1 + np.exp(-logits)))


def bernoulli() -> Fit:
    """Fit a Bernoulli GLMM; the likelihood is by quadrature, its maximum by BFGS."""
    data = bernoulli_data()
    x, y = float64(*data)
    sign = 1 - 2 * y[..., None]

    def log_likelihood(params: Params) -> float:
        b, sd = float64(params["b"], params["sd"])
        return integrate_groups(
            lambda eta: -np.logaddexp(0, sign * eta), b[0] + b[1] * x, float(sd)
        )

    return Fit(bernoulli_model, data, log_likelihood, highest(log_likelihood, 1.3))


def highest(log_likelihood: Callable[[Params], float], log_sd: float) -> float:
    """Maximise the likelihood of a GLMM with one covariate and one variance."""

    def negative(z: Array) -> float:
        return -log_likelihood({"b": z[:2], "sd": np.exp(z[2])})

    return -float(optimize.minimize(negative, [0.0, 0.5, log_sd], method="BFGS").fun)


def poisson_model(x: Array, y: Array) -> None:
    """Give each group, one row of the data, a normal effect on the log scale."""
    b = numpyro.param("b", jnp.zeros(2))
    sd = numpyro.param("sd", 1.0, constraint=constraints.positive)
    with numpyro.plate("group", y.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
        with numpyro.plate("row", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(b[0] + b[1] * x + u)), obs=y)


def poisson() -> Fit:
    """Fit a Poisson GLMM of 200 groups; the likelihood is by quadrature."""
    data = glmm().args
    x, y = float64(*data)

    def log_likelihood(params: Params) -> float:
        b, sd = float64(params["b"], params["sd"])
        return integrate_groups(log_poisson(y), b[0] + b[1] * x, float(sd))

    return Fit(poisson_model, data, log_likelihood, highest(log_likelihood, -0.7))


def logistic_model(x: Array, y: Array) -> None:
    """Regress a binary outcome, the mean of the coefficients to be estimated."""
    mean = numpyro.param("mean", jnp.zeros(()))
    prior = dist.Normal(mean * jnp.ones(x.shape[1]), PRIOR_VARIANCE**0.5)
    w = numpyro.sample("w", prior.to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def logistic(num_draws: int = 100_000) -> Fit:
    """Fit the mean of nine coefficients; the likelihood is by importance sampling.

    The same draws serve every value of the mean, so that differences of the likelihood
    are good to more digits than the likelihood itself.
    """
    data = wisconsin().args
    x, y = float64(*data)

    def log_prior(w: Array, mean: float) -> Array:
        scale = PRIOR_VARIANCE**0.5
        return np.asarray(stats.norm.logpdf(w, mean, scale).sum(-1))

    def log_joint(w: Array) -> Array:
        log_chance = -np.logaddexp(0, (1 - 2 * y) * (w @ x.T)).sum(-1)
        return np.asarray(log_chance + log_prior(w, 1.0))

    mode, root = approximate(log_joint, np.ones(x.shape[1]))
    proposal = stats.multivariate_t(mode, 1.1 * root @ root.T, df=8, seed=1)
    draws = proposal.rvs(num_draws)
    parts = np.array_split(draws, 20)
    ratio = np.concatenate([log_joint(part) for part in parts]) - proposal.logpdf(draws)
    ratio -= log_prior(draws, 1.0) + np.log(num_draws)

    def log_likelihood(params: Params) -> float:
        return float(special.logsumexp(ratio + log_prior(draws, float(params["mean"]))))

    best = optimize.minimize_scalar(lambda m: -log_likelihood({"mean": m}), (0.5, 1.5))
    return Fit(logistic_model, data, log_likelihood, -float(best.fun))
