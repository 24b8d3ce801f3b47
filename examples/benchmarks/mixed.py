"""Fit classical mixed models by default settings, and compare with other software.

Each case is fitted from the start a user would take: the mean of the data, and half its
standard deviation for each scale. Run ``python examples/benchmarks/mixed.py --help``.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from records import emit, steps_or_auto

from numpyro_jala import JALAEM, datasets

REFERENCES = Path(__file__).with_name("mixed_references.json")
Table = dict[str, np.ndarray]


class Case(NamedTuple):
    """A model, its data, and where its params stand in the reference."""

    model: Callable[..., None]
    args: tuple[Any, ...]
    names: dict[str, tuple[str, Any]]  # in the reference: a param site and an index


def read(name: str) -> Table:
    """Read a table, numbers as float32."""
    columns = datasets.read_table(name).items()
    return {key: c.astype(np.float32) if c.dtype.kind == "f" else c for key, c in columns}


def index(column: np.ndarray) -> np.ndarray:
    """Number the levels of a factor."""
    return np.unique(column, return_inverse=True)[1].astype(np.int32)


def positive(name: str, value: float) -> Any:
    """Declare a scale."""
    return numpyro.param(name, value, constraint=constraints.positive)


def gaussian_model(x: np.ndarray, groups: dict[str, np.ndarray], y: np.ndarray) -> None:
    """Give each level of each factor a normal effect."""
    half = float(np.std(y)) / 2
    beta = numpyro.param("beta", jnp.zeros(x.shape[1]).at[0].set(float(np.mean(y))))
    mean = x @ beta
    for name, level in groups.items():
        sd = positive(f"sd_{name}", half)
        with numpyro.plate(name, int(level.max()) + 1):
            mean = mean + numpyro.sample(f"u_{name}", dist.Normal(0.0, sd))[level]
    numpyro.sample("y", dist.Normal(mean, positive("sigma", half)), obs=y)


def glmm_model(
    family: str, x: np.ndarray, level: np.ndarray, y: np.ndarray, n: Any
) -> None:
    """Give each group a normal effect on the scale of the link."""
    beta = numpyro.param("beta", jnp.zeros(x.shape[1]))
    sd = positive("sd", 1.0)
    with numpyro.plate("group", int(level.max()) + 1):
        u = numpyro.sample("u", dist.Normal(0.0, sd))
    eta = x @ beta + u[level]
    if family == "poisson":
        numpyro.sample("y", dist.Poisson(jnp.exp(eta)), obs=y)
    else:
        numpyro.sample("y", dist.Binomial(n, logits=eta), obs=y)


def slope_model(subject: np.ndarray, days: np.ndarray, y: np.ndarray) -> None:
    """Give each subject an intercept and a slope, correlated."""
    half = float(np.std(y)) / 2
    beta = numpyro.param("beta", jnp.array([float(np.mean(y)), 0.0]))
    sd = numpyro.param("sd", jnp.array([half, half / 5]), constraint=constraints.positive)
    rho = numpyro.param("rho", 0.0, constraint=constraints.interval(-1.0, 1.0))
    root = jnp.array([[1.0, 0.0], [rho, jnp.sqrt(1 - rho**2)]])
    with numpyro.plate("subject", int(subject.max()) + 1):
        u = numpyro.sample(
            "u", dist.MultivariateNormal(beta, scale_tril=sd[:, None] * root)
        )
    mean = u[subject, 0] + u[subject, 1] * days
    numpyro.sample("y", dist.Normal(mean, positive("sigma", half)), obs=y)


def level_model(y: np.ndarray) -> None:
    """Let a level walk under the observations."""
    half = float(np.std(y)) / 2
    noise, walk = positive("sigma_eps", half), positive("sigma_eta", half)

    def step(last: Any, _: Any) -> tuple[Any, Any]:
        level = numpyro.sample("level", dist.Normal(last, walk))
        return level, level

    first = numpyro.sample("first", dist.Normal(1000.0, 250.0))
    _, rest = scan(step, first, None, length=len(y) - 1)
    level = jnp.concatenate([first[None], rest])
    numpyro.sample("y", dist.Normal(level, noise), obs=y)


def ones(size: int, *columns: Any) -> np.ndarray:
    """Make a design matrix with an intercept."""
    return np.stack([np.ones(size), *columns], 1).astype(np.float32)


def gaussian_case(name: str, response: str, factors: dict[str, str]) -> Case:
    """Build a model with an intercept and crossed or nested factors."""
    table = read(name)
    y = table[response]
    groups = {factor: index(table[factor]) for factor in factors}
    names: dict[str, tuple[str, Any]] = {
        "(Intercept)": ("beta", 0),
        "Residual": ("sigma", ()),
    }
    names |= {label: (f"sd_{factor}", ()) for factor, label in factors.items()}
    return Case(gaussian_model, (ones(len(y)), groups, y), names)


def glmm_case(family: str, x: np.ndarray, level: np.ndarray, y: Any, n: Any) -> Case:
    """Build a generalised linear model with a random intercept; names by position."""
    names: dict[str, tuple[str, Any]] = {f"beta{i}": ("beta", i) for i in range(x.shape[1])}
    return Case(glmm_model, (family, x, level, y, n), names | {"sd": ("sd", ())})


def build(name: str) -> Case:
    """Build one case."""
    batch = {"Batch": "Batch (Intercept)"}
    if name in ("dyestuff", "dyestuff2"):
        return gaussian_case(name, "Yield", batch)
    if name == "penicillin":
        labels = {"plate": "plate (Intercept)", "sample": "sample (Intercept)"}
        return gaussian_case(name, "diameter", labels)
    if name == "pastes":
        labels = {"sample": "sample (Intercept)", "batch": "batch (Intercept)"}
        return gaussian_case(name, "strength", labels)
    if name == "nile":
        names = {key: (key, ()) for key in ("sigma_eps", "sigma_eta")}
        return Case(level_model, (read(name)["flow"],), names)
    table = read(name.split("_")[0])
    if name.startswith("sleepstudy"):
        subject, days, y = index(table["Subject"]), table["Days"], table["Reaction"]
        fixed = {"(Intercept)": ("beta", 0), "Days": ("beta", 1)}
        if name == "sleepstudy_intercept":
            scales = {"Subject (Intercept)": ("sd_subject", ()), "Residual": ("sigma", ())}
            args = (ones(len(y), days), {"subject": subject}, y)
            return Case(gaussian_model, args, fixed | scales)
        scales = {"sd_int": ("sd", 0), "sd_slope": ("sd", 1), "rho": ("rho", ())}
        scales |= {"sd_residual": ("sigma", ())}
        return Case(slope_model, (subject, days, y), fixed | scales)
    if name == "epil":
        drug = table["trt"] == "progabide"
        base = table["lbase"]
        x = ones(len(base), base, drug, table["lage"], table["V4"], base * drug)
        return glmm_case("poisson", x, index(table["subject"]), table["y"], 0)
    if name == "cbpp":
        periods = [table["period"] == period for period in (2, 3, 4)]
        x = ones(len(periods[0]), *periods)
        trials = table["size"].astype(np.int32)
        return glmm_case("binomial", x, index(table["herd"]), table["incidence"], trials)
    arms = [table["trt"] == arm for arm in ("drug", "drug+")]
    x = ones(len(arms[0]), *arms, table["w2"])
    return glmm_case("binomial", x, index(table["ID"]), table["yy"], 1)


CASES = (
    "sleepstudy_slope",
    "sleepstudy_intercept",
    "dyestuff",
    "dyestuff2",
    "penicillin",
    "pastes",
    "epil",
    "cbpp",
    "bacteria",
    "nile",
)


def nats_apart(jala: JALAEM, case: Case, exact: dict[str, Any]) -> float:
    """Return the nats between the likelihood at the reference and at the estimate.

    As if it were quadratic, with the curvature found there, and without params that are at
    the edge of their support.
    """
    labels, change = [], []
    for label, (site, where) in case.names.items():
        labels.append(site if where == () else f"{site}[{where}]")
        change.append(float(jala.params[site][where]) - exact[label]["est"])
    covariance = jala.covariance().loc[labels, labels].to_numpy()
    known = np.isfinite(np.diag(covariance))
    difference = np.array(change)[known]
    inverse = np.linalg.inv(covariance[np.ix_(known, known)])
    return float(0.5 * difference @ inverse @ difference)


def measure(name: str, num_steps: int | None, seed: int, jala: JALAEM, case: Case) -> None:
    """Fit once, and print the errors in units of the reference's standard errors."""
    reference = json.loads(REFERENCES.read_text())[name]
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(seed), num_steps, *case.args, progress_bar=False)
    seconds = time.perf_counter() - start
    errors = jala.standard_errors()
    exact = dict(zip(case.names, reference["estimates"].values(), strict=True))
    if set(case.names) == set(reference["estimates"]):
        exact = reference["estimates"]
    shifts, ratios = {}, {}
    for label, (site, where) in case.names.items():
        estimate, error = float(jala.params[site][where]), float(errors[site][where])
        scale = exact[label].get("se", error)
        if np.isfinite(error):  # not at the edge of the support
            shifts[label] = (estimate - exact[label]["est"]) / scale
            if "se" in exact[label]:
                ratios[label] = error / exact[label]["se"] - 1
    emit(
        {
            "case": name,
            "seed": seed,
            "seconds": round(seconds, 2),
            "num_steps": int(jala.diagnostics()["num_steps"]),
            "worst_shift": max(map(abs, shifts.values())),
            "worst_se_error": max(map(abs, ratios.values())),
            "log_likelihood_error": jala.log_evidence - reference["log_likelihood"],
            "log_evidence_se": jala.log_evidence_se,
            "shortfall": nats_apart(jala, case, exact),
            "reported_shortfall": float(jala.diagnostics()["shortfall"]),
            "shifts": {key: round(value, 4) for key, value in shifts.items()},
            "se_errors": {key: round(value, 4) for key, value in ratios.items()},
            "warnings": sorted({str(each.message)[:80] for each in caught}),
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--steps", type=steps_or_auto, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    for chosen in args.case or CASES:
        built = build(chosen)
        fitted = JALAEM(built.model)
        for each_seed in range(args.seeds):
            measure(chosen, args.steps, each_seed, fitted, built)
