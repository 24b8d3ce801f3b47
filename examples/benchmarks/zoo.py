"""Fit models of many kinds by default settings, and compare with exact likelihoods.

Each case has latents that can be integrated out in closed form or by quadrature, so the
maximum and the standard errors are known. Run ``python examples/benchmarks/zoo.py --help``.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import hidden
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from cases import Case, fraction, positive
from jax import random
from quadrature import approximate, float32, float64, integrate_groups
from records import emit, steps_or_auto
from scipy import special, stats

from numpyro_jala import JALAEM


def baseball() -> Case:
    """Batting averages with a Beta prior whose mean and size are estimated."""
    rng = np.random.default_rng(1)
    trials = np.full(18, 45)
    hits = rng.binomial(trials, rng.beta(20.0, 55.0, size=18)).astype(np.float32)

    def model(n: Any, y: Any) -> None:
        mean, size = fraction("mean", 0.5), positive("size", 10.0)
        with numpyro.plate("player", 18):
            p = numpyro.sample("p", dist.Beta(mean * size, (1 - mean) * size))
            numpyro.sample("y", dist.Binomial(n, probs=p), obs=y)

    def log_likelihood(params: dict[str, Any]) -> float:
        a, b = params["mean"] * params["size"], (1 - params["mean"]) * params["size"]
        return float(stats.betabinom(trials, a, b).logpmf(hits).sum())

    return Case(
        model,
        (trials, hits),
        lambda z: {"mean": special.expit(z[0]), "size": np.exp(z[1])},
        lambda p: np.array([special.logit(p["mean"]), np.log(p["size"])]),
        log_likelihood,
        np.array([-1.0, 4.0]),
    )


def gaussian_process() -> Case:
    """A smooth function seen with noise; the kernel's params are estimated."""
    rng = np.random.default_rng(2)
    x = np.linspace(0, 6, 40)
    (y,) = float32(np.sin(1.5 * x) + 0.3 * rng.normal(size=40))
    gap = (x[:, None] - x) ** 2
    jitter = 1e-4

    def model(squares: Any, y: Any) -> None:
        scale, length = positive("scale", 1.5), positive("length", 1.5)
        noise = positive("noise", 0.5)
        kernel = scale**2 * jnp.exp(-squares / (2 * length**2))
        root = jnp.linalg.cholesky(kernel + jitter * jnp.eye(40))
        z = numpyro.sample("z", dist.Normal(jnp.zeros(40), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(root @ z, noise), obs=y)

    def log_likelihood(params: dict[str, Any]) -> float:
        kernel = params["scale"] ** 2 * np.exp(-gap / (2 * params["length"] ** 2))
        cov = kernel + (jitter + params["noise"] ** 2) * np.eye(40)
        return float(stats.multivariate_normal(cov=cov).logpdf(float64(y)[0]))

    names = ("scale", "length", "noise")
    return Case(
        model,
        (gap.astype(np.float32), y),
        lambda z: dict(zip(names, np.exp(z), strict=True)),
        lambda p: np.log([p[name] for name in names]),
        log_likelihood,
        np.log([1.0, 1.0, 0.3]),
    )


def factor_analysis() -> Case:
    """One factor behind five measurements, of which each has its own noise."""
    rng = np.random.default_rng(3)
    loading = np.array([1.0, -0.8, 0.6, 0.4, 1.5])
    factor = rng.normal(size=(60, 1))
    (y,) = float32(factor * loading + 0.7 * rng.normal(size=(60, 5)))

    def model(y: Any) -> None:
        weights = numpyro.param("weights", jnp.array([0.5, -0.5, 0.5, 0.5, 0.5]))
        noise = positive("noise", jnp.ones(5))
        with numpyro.plate("person", 60):
            f = numpyro.sample("f", dist.Normal())
            mean = f[:, None] * weights
            numpyro.sample("y", dist.Normal(mean, noise).to_event(1), obs=y)

    def log_likelihood(params: dict[str, Any]) -> float:
        w = np.asarray(params["weights"], float)
        cov = np.outer(w, w) + np.diag(np.asarray(params["noise"], float) ** 2)
        return float(stats.multivariate_normal(cov=cov).logpdf(float64(y)[0]).sum())

    return Case(
        model,
        (y,),
        lambda z: {"weights": z[:5], "noise": np.exp(z[5:])},
        lambda p: np.concatenate([p["weights"], np.log(p["noise"])]),
        log_likelihood,
        np.concatenate([loading, np.log(np.full(5, 0.7))]),
    )


def item_response() -> Case:
    """Abilities of 150 people behind eight yes-or-no items (2PL)."""
    rng = np.random.default_rng(4)
    slope, ease = np.linspace(0.7, 1.8, 8), np.linspace(-1.2, 1.2, 8)
    eta = rng.normal(size=(150, 1)) * slope + ease
    (y,) = float32(rng.random((150, 8)) < special.expit(eta))

    def model(y: Any) -> None:
        a, b = positive("slope", jnp.ones(8)), numpyro.param("ease", jnp.zeros(8))
        with numpyro.plate("person", 150):
            ability = numpyro.sample("ability", dist.Normal())
            logits = ability[:, None] * a + b
            numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    nodes, width = np.linspace(-8, 8, 201, retstep=True)

    def log_likelihood(params: dict[str, Any]) -> float:
        a, b = float64(params["slope"], params["ease"])
        sign = 2 * float64(y)[0] - 1
        eta = nodes[:, None, None] * a + b
        each = -np.logaddexp(0, -sign * eta).sum(-1)  # (nodes, people)
        prior = stats.norm.logpdf(nodes) + np.log(width)
        return float(special.logsumexp(each + prior[:, None], axis=0).sum())

    return Case(
        model,
        (y,),
        lambda z: {"slope": np.exp(z[:8]), "ease": z[8:]},
        lambda p: np.concatenate([np.log(p["slope"]), p["ease"]]),
        log_likelihood,
        np.concatenate([np.log(slope), ease]),
    )


def zero_inflated() -> Case:
    """Counts in groups, some of them zero for another reason."""
    rng = np.random.default_rng(5)
    group = np.repeat(np.arange(40), 6)
    rate = np.exp(1.0 + 0.6 * rng.normal(size=40)[group])
    (y,) = float32(rng.poisson(rate) * (rng.random(240) > 0.25))

    def model(y: Any) -> None:
        mu, sd = numpyro.param("mu", 0.0), positive("sd", 1.0)
        gate = fraction("gate", 0.5)
        with numpyro.plate("group", 40):
            u = numpyro.sample("u", dist.Normal(mu, sd))
        counts = dist.ZeroInflatedPoisson(gate, jnp.exp(u[group]))
        numpyro.sample("y", counts, obs=y)

    table = float64(y)[0].reshape(40, 6)

    def log_likelihood(params: dict[str, Any]) -> float:
        gate = params["gate"]

        def log_density(eta: np.ndarray) -> np.ndarray:
            counts = table[..., None]
            log_poisson = counts * eta - np.exp(eta) - special.gammaln(counts + 1)
            more = np.log1p(-gate) + log_poisson
            return np.where(counts == 0, np.logaddexp(np.log(gate), more), more)

        return integrate_groups(log_density, np.full((40, 6), params["mu"]), params["sd"])

    return Case(
        model,
        (y,),
        lambda z: {"mu": z[0], "sd": np.exp(z[1]), "gate": special.expit(z[2])},
        lambda p: np.array([p["mu"], np.log(p["sd"]), special.logit(p["gate"])]),
        log_likelihood,
        np.array([1.0, -0.5, -1.0]),
    )


CASES = {
    each.__name__: each
    for each in (baseball, gaussian_process, factor_analysis, item_response, zero_inflated)
} | hidden.CASES


def measure(name: str, num_steps: int | None, seeds: range) -> None:
    """Fit with several seeds, and print errors in units of exact standard errors."""
    case = CASES[name]()

    def exact(z: np.ndarray) -> float:
        return case.log_likelihood(case.unpack(z))

    best, root = approximate(exact, case.start)
    errors = np.sqrt(np.diag(root @ root.T))
    jala = JALAEM(case.model)
    for seed in seeds:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            jala.run(random.key(seed), num_steps, *case.args, progress_bar=False)
        params = {key: np.asarray(value, float) for key, value in jala.params.items()}
        found = jala.covariance()
        shift = (case.pack(params) - best) / errors
        emit(
            {
                "case": name,
                "seed": seed,
                "num_steps": int(jala.diagnostics()["num_steps"]),
                "worst_shift": float(np.abs(shift).max()),
                "shortfall": exact(best) - case.log_likelihood(params),
                "reported_shortfall": float(jala.diagnostics()["shortfall"]),
                "log_evidence_error": jala.log_evidence - case.log_likelihood(params),
                "log_evidence_se": jala.log_evidence_se,
                "num_unknown": int(np.isnan(np.diag(found)).sum()),
                "warnings": sorted({str(each.message)[:120] for each in caught}),
            }
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--steps", type=steps_or_auto, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for chosen in options.case or CASES:
        measure(chosen, options.steps, seeds)
