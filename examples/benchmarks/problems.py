"""Models without params whose evidence is known, with their data.

The models see float32 arrays; the answers are computed from the same arrays in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from quadrature import (
    Array,
    float32,
    float64,
    gauss_hermite,
    importance_sampling,
    integrate_groups,
)
from scipy import integrate, special, stats

Params = dict[str, Any]
DATA = Path(__file__).parents[1] / "data"
STUDENT_CACHE = Path(__file__).with_name("student_reference.json")


class Evidence(NamedTuple):
    """A model without params, its data, and its log-evidence."""

    model: Callable[..., None]
    args: tuple[Array, ...]
    log_evidence: float
    log_evidence_se: float = 0.0  # of the reference itself, where it was simulated


def regression_data(is_student: bool = False) -> tuple[Array, ...]:
    """Simulate the paper's regression, with d_y = 500 and d_x = 8."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(500, 8)), rng.normal(size=8)
    noise = rng.standard_t(4, size=500) if is_student else rng.normal(size=500)
    return float32(x, x @ w + noise)


def coefficients(x: Array, log_alpha: Any, log_sigma2: Any) -> tuple[Any, Any]:
    """Sample coefficients of precision alpha; give the mean and the scale of y."""
    prior = dist.Normal(jnp.zeros(x.shape[1]), jnp.exp(-0.5 * log_alpha)).to_event(1)
    return x @ numpyro.sample("w", prior), jnp.exp(0.5 * log_sigma2)


def gaussian_model(x: Array, y: Array) -> None:
    """Regress with Gaussian noise at (log sigma^2, log alpha) = (1, 1)."""
    numpyro.sample("y", dist.Normal(*coefficients(x, 1.0, 1.0)), obs=y)


def gaussian_param_model(x: Array, y: Array) -> None:
    """Regress with Gaussian noise, both variances to be estimated."""
    log_sigma2 = numpyro.param("log_sigma2", 1.0)
    log_alpha = numpyro.param("log_alpha", 1.0)
    numpyro.sample("y", dist.Normal(*coefficients(x, log_alpha, log_sigma2)), obs=y)


def gaussian_log_evidence(params: Params) -> float:
    """Compute the Gaussian regression's evidence in closed form."""
    x, y = float64(*regression_data())
    sigma2, alpha = (
        np.exp(float(params["log_sigma2"])),
        np.exp(float(params["log_alpha"])),
    )
    covariance = sigma2 * np.eye(len(y)) + x @ x.T / alpha
    return float(stats.multivariate_normal(cov=covariance).logpdf(y))


def gaussian_posterior(seed: int, num_draws: int, params: Params) -> Array:
    """Draw the Gaussian regression's coefficients from their exact posterior."""
    x, y = float64(*regression_data())
    sigma2, alpha = (
        np.exp(float(params["log_sigma2"])),
        np.exp(float(params["log_alpha"])),
    )
    covariance = np.linalg.inv(x.T @ x / sigma2 + alpha * np.eye(x.shape[1]))
    rng = np.random.default_rng(seed)
    mean = covariance @ x.T @ y / sigma2
    return rng.multivariate_normal(mean, covariance, num_draws).astype(np.float32)


def gaussian() -> Evidence:
    """Regress with Gaussian noise; the answer has a closed form."""
    exact = gaussian_log_evidence({"log_sigma2": 1.0, "log_alpha": 1.0})
    return Evidence(gaussian_model, regression_data(), exact)


def student_model(x: Array, y: Array) -> None:
    """Regress with Student-t noise, 4 degrees of freedom, at theta = (1, 1)."""
    numpyro.sample("y", dist.StudentT(4.0, *coefficients(x, 1.0, 1.0)), obs=y)


def student_reference(num_draws: int = 2_000_000) -> dict[str, float]:
    """Give the Student-t regression's evidence, from the cache if it is there."""
    if STUDENT_CACHE.exists():
        return dict(json.loads(STUDENT_CACHE.read_text()))
    x, y = float64(*regression_data(is_student=True))
    constant = y.size * stats.t.logpdf(0.0, 4, scale=np.exp(0.5))

    def log_joint(w: Array) -> Array:
        log_likelihood = -2.5 * np.log1p((y - w @ x.T) ** 2 / (4 * np.e)).sum(-1)
        log_prior = stats.norm.logpdf(w, scale=np.exp(-0.5)).sum(-1)
        return np.asarray(log_prior + log_likelihood + constant)

    start = np.linalg.lstsq(x, y, rcond=None)[0]
    exact, se = importance_sampling(log_joint, start, num_draws)
    record = {"log_evidence": exact, "log_evidence_se": se, "num_draws": num_draws}
    STUDENT_CACHE.write_text(json.dumps(record) + "\n")
    return record


def student() -> Evidence:
    """Regress with Student-t noise; the answer is from importance sampling."""
    exact = student_reference()
    data = regression_data(is_student=True)
    return Evidence(student_model, data, exact["log_evidence"], exact["log_evidence_se"])


def wisconsin_model(x: Array, y: Array) -> None:
    """Classify by logistic regression, the coefficients of variance 5."""
    prior = dist.Normal(jnp.zeros(x.shape[1]), jnp.sqrt(5.0)).to_event(1)
    numpyro.sample("y", dist.Bernoulli(logits=x @ numpyro.sample("w", prior)), obs=y)


def wisconsin() -> Evidence:
    """Classify tumours; the answer is from importance sampling, 2 million draws."""
    table = np.loadtxt(DATA / "wisconsin.csv", delimiter=",", skiprows=1)
    x, y = table[:, :-1], table[:, -1]
    data = float32((x - x.mean(0)) / x.std(0), y)
    return Evidence(wisconsin_model, data, -74.200676, 0.00065)


def eight_schools_model(scale: Array, y: Array) -> None:
    """Pool eight schools, non-centred."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * z, scale), obs=y)


def eight_schools() -> Evidence:
    """Pool eight schools; given tau the data are Gaussian, so tau alone is left."""
    data = float32([15, 10, 16, 11, 9, 11, 10, 18], [28, 8, -3, 7, -1, 1, 18, 12])
    scale, y = float64(*data)

    def density(angle: float) -> float:
        covariance = np.diag(scale**2 + (5 * np.tan(angle)) ** 2) + 25.0
        return float(stats.multivariate_normal(cov=covariance).pdf(y)) * 2 / np.pi

    # tau = 5 tan(angle) is HalfCauchy(5) for a uniform angle
    value = integrate.quad(density, 0, np.pi / 2, epsabs=0, epsrel=1e-10)[0]
    return Evidence(eight_schools_model, data, float(np.log(value)))


def glmm_model(x: Array, y: Array) -> None:
    """Count with a Poisson GLMM, one row per group; both fixed effects are latent."""
    b = numpyro.sample("b", dist.Normal(jnp.zeros(2), 2.0).to_event(1))
    with numpyro.plate("group", y.shape[0], dim=-2):
        u = numpyro.sample("u", dist.Normal(0.0, 0.5))
        with numpyro.plate("row", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(jnp.exp(b[0] + b[1] * x + u)), obs=y)


def log_poisson(y: Array) -> Callable[[Array], Array]:
    """Return the log-likelihood of counts as a function of the log of their means."""
    counts = y[..., None]
    return lambda eta: np.asarray(counts * eta - np.exp(eta) - special.gammaln(counts + 1))


def glmm(num_groups: int = 200) -> Evidence:
    """Count in groups of 5; the answer is by quadrature."""
    rng = np.random.default_rng(0)
    u, x = 0.5 * rng.normal(size=(num_groups, 1)), rng.normal(size=(num_groups, 5))
    data = float32(x, rng.poisson(np.exp(0.5 + 0.3 * x + u)))
    x, y = float64(*data)

    def log_density(b: Array) -> float:
        log_prior = float(stats.norm.logpdf(b, scale=2.0).sum())
        return log_prior + integrate_groups(log_poisson(y), b[0] + b[1] * x, 0.5)

    return Evidence(glmm_model, data, gauss_hermite(log_density, [0.5, 0.3]))


def glmm10() -> Evidence:
    """Count in 10 groups."""
    return glmm(num_groups=10)


def gamma_poisson_model(y: Array) -> None:
    """Counts at the rate of their group, skewed and each group by itself."""
    with numpyro.plate("groups", y.shape[0], dim=-2):
        rate = numpyro.sample("rate", dist.Gamma(0.7, 0.3))
        with numpyro.plate("rows", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(rate), obs=y)


def gamma_poisson(num_groups: int = 30, num_rows: int = 3) -> tuple[Array, Array]:
    """Draw counts, and return them with the log-evidence of each group."""
    rng = np.random.default_rng(0)
    rate = rng.gamma(0.7, 1 / 0.3, size=(num_groups, 1))
    y = rng.poisson(rate, size=(num_groups, num_rows))
    total = y.sum(1)
    exact = special.gammaln(0.7 + total) - special.gammaln(0.7) + 0.7 * np.log(0.3)
    exact -= (0.7 + total) * np.log(0.3 + num_rows) + special.gammaln(y + 1.0).sum(1)
    return y.astype(np.float32), exact


def beta_binomial_model(y: Array) -> None:
    """Count successes out of 6, the probabilities heaped at 0 and 1."""
    with numpyro.plate("group", len(y)):
        p = numpyro.sample("p", dist.Beta(0.1, 0.1))
        numpyro.sample("y", dist.Binomial(6, p), obs=y)


def beta_binomial() -> Evidence:
    """Count successes in 20 groups; the answer has a closed form."""
    rng = np.random.default_rng(0)
    data = float32(rng.binomial(6, rng.beta(0.1, 0.2, size=20)))
    (y,) = float64(*data)
    exact = stats.betabinom.logpmf(y, 6, 0.1, 0.1).sum()
    return Evidence(beta_binomial_model, data, float(exact))


def funnel_model(y: Array) -> None:
    """Let the scale of nine latents be exp(v / 2), centred."""
    v = numpyro.sample("v", dist.Normal(0.0, 3.0))
    with numpyro.plate("row", len(y)):
        x = numpyro.sample("x", dist.Normal(0.0, jnp.exp(v / 2)))
        numpyro.sample("y", dist.Normal(x, 2.0), obs=y)


def funnel() -> Evidence:
    """Observe a funnel through noise; given v the data are N(0, e^v + 4)."""
    data = float32([-1.8, 0.6, 3.1, -0.4, 2.2, 1.3, -2.7, 0.9, 4.0])
    (y,) = float64(*data)

    def density(v: float) -> float:
        log_likelihood = stats.norm.logpdf(y, scale=np.sqrt(np.exp(v) + 4)).sum()
        return float(np.exp(log_likelihood + stats.norm.logpdf(v, scale=3.0)))

    value = integrate.quad(density, -30, 30, points=[0], epsabs=0, epsrel=1e-10)[0]
    return Evidence(funnel_model, data, float(np.log(value)))
