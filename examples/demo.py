"""Do people differ in how lack of sleep slows them down, or only in how fast they are?

Fits two models of the sleep study of Belenky et al. (2003) by maximum marginal likelihood
and compares their log-evidences. In both models the integral over the subjects is
Gaussian, so lme4 knows the answers.
"""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from numpyro.distributions import constraints

from numpyro_jala import JALAEM, datasets

# Maximum likelihood fits of lme4 1.1-31: Bates, Mächler, Bolker and Walker (2015),
# Journal of Statistical Software 67(1).
LME4 = {
    "random intercept": {
        "mean intercept": 251.4051,
        "mean slope": 10.4673,
        "sd of intercepts": 36.0121,
        "residual sd": 30.8954,
        "log-evidence": -897.0393,
    },
    "random intercept and slope": {
        "mean intercept": 251.4051,
        "mean slope": 10.4673,
        "sd of intercepts": 23.7798,
        "sd of slopes": 5.7168,
        "correlation": 0.0813,
        "residual sd": 25.5919,
        "log-evidence": -875.9697,
    },
}


class Fit(NamedTuple):
    """A fitted model, and what its run returned."""

    name: str
    jala: JALAEM
    idata: Any


def fixed_effects_and_noise():
    beta = numpyro.param("beta", jnp.array([200.0, 0.0]))
    sigma = numpyro.param("sigma", 50.0, constraint=constraints.positive)
    return beta, sigma


def random_intercept(num_subjects, subject, days, reaction=None):
    beta, sigma = fixed_effects_and_noise()
    tau = numpyro.param("tau", jnp.array([30.0]), constraint=constraints.positive)
    with numpyro.plate("subject", num_subjects):
        u = numpyro.sample("u", dist.Normal(beta[0], tau[0]))
    mean = u[subject] + beta[1] * days
    numpyro.sample("reaction", dist.Normal(mean, sigma), obs=reaction)


def random_slope(num_subjects, subject, days, reaction=None):
    beta, sigma = fixed_effects_and_noise()
    tau = numpyro.param("tau", jnp.array([30.0, 10.0]), constraint=constraints.positive)
    L = numpyro.param("L", jnp.eye(2), constraint=constraints.corr_cholesky)
    with numpyro.plate("subject", num_subjects):
        scale_tril = tau[:, None] * L
        u = numpyro.sample("u", dist.MultivariateNormal(beta, scale_tril=scale_tril))
    mean = u[subject, 0] + u[subject, 1] * days
    numpyro.sample("reaction", dist.Normal(mean, sigma), obs=reaction)


MODELS = dict(zip(LME4, (random_intercept, random_slope), strict=True))


def fit(rng_key, name, num_steps, data):
    num_subjects = int(data[0].max()) + 1
    jala = JALAEM(MODELS[name])
    return Fit(name, jala, jala.run(rng_key, num_steps, num_subjects, *data))


def quantities(params):
    """Name the parameters, or their traces, as lme4 reports them."""
    beta, tau, sigma = (np.asarray(params[site]) for site in ("beta", "tau", "sigma"))
    named = {
        "mean intercept": beta[..., 0],
        "mean slope": beta[..., 1],
        "sd of intercepts": tau[..., 0],
        "residual sd": sigma,
    }
    if "L" in params:
        named["sd of slopes"] = tau[..., 1]
        named["correlation"] = np.asarray(params["L"])[..., 1, 0]
    return named


def report(result):
    """Print the estimates and the log-evidence beside those of lme4."""
    lme4 = LME4[result.name]
    jala = result.jala
    print(f"\n{result.name:<28}{'JALAEM':>10}{'s.e.':>8}{'lme4':>10}")
    for name, value in quantities(jala.params).items():
        print(f"  {name:<26}{value:>10.2f}{'':>8}{lme4[name]:>10.2f}")
    evidence = f"{jala.log_evidence:>10.3f}{jala.log_evidence_se:>8.3f}"
    print(f"  {'log-evidence':<26}{evidence}{lme4['log-evidence']:>10.3f}")


def compare(small, large):
    """Print which model explains the data better, and by how much."""
    gain = large.jala.log_evidence - small.jala.log_evidence
    error = math.hypot(small.jala.log_evidence_se, large.jala.log_evidence_se)
    lme4 = LME4[large.name]["log-evidence"] - LME4[small.name]["log-evidence"]
    extra = len(quantities(large.jala.params)) - len(quantities(small.jala.params))
    winner, loser = (large, small) if gain > 0 else (small, large)
    print(
        f"\nThe model with {winner.name} beats the one with {loser.name} by "
        f"{abs(gain):.3f} nats (standard error {error:.3f}; lme4: {lme4:.3f})."
    )
    # A maximised likelihood favours the larger of two nested models.
    print(
        f"The larger model has {extra} parameters more; its AIC is lower by "
        f"{2 * (gain - extra):.3f} (standard error {2 * error:.3f}; "
        f"lme4: {2 * (lme4 - extra):.3f})."
    )


def plot(results, path):
    """Draw every parameter and the log-evidence against the EM step."""
    names = list(quantities(results[-1].jala.params))
    figure = Figure(figsize=(9, 7.5), layout="constrained")
    axes = figure.subplot_mosaic([names[:3], names[3:], ["log-evidence"] * 3])
    for color, result in zip(("C0", "C1"), results, strict=True):
        trace = result.idata["em_trace"]
        log_evidence, error = (
            np.asarray(trace[field]) for field in ("log_evidence", "log_evidence_se")
        )
        steps = np.arange(1, log_evidence.size + 1)
        for name, values in quantities(trace).items():
            axes[name].plot(steps, values, color=color)
            axes[name].axhline(LME4[result.name][name], color=color, ls=":", lw=1)
        ax = axes["log-evidence"]
        ax.plot(steps, log_evidence, color=color, label=result.name)
        low, high = log_evidence - 2 * error, log_evidence + 2 * error
        ax.fill_between(steps, low, high, color=color, alpha=0.3, lw=0)
        ax.axhline(LME4[result.name]["log-evidence"], color=color, ls=":", lw=1)
    for name, ax in axes.items():
        ax.set_title(name)
        ax.set_xlabel("EM step")
        ax.ticklabel_format(useOffset=False)
    axes["log-evidence"].set_ylim(-905, -870)
    axes["log-evidence"].plot([], [], color="black", ls=":", lw=1, label="lme4")
    axes["log-evidence"].legend(loc="center right")
    figure.savefig(path, dpi=150)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="EM steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    data = datasets.load_sleepstudy()[:3]  # subject, days, reaction
    keys = jax.random.split(jax.random.key(args.seed), len(MODELS))
    results = [
        fit(key, name, args.steps, data) for key, name in zip(keys, MODELS, strict=True)
    ]
    for result in results:
        report(result)
        path = args.output / f"{result.name.replace(' ', '_')}.nc"
        result.idata.to_netcdf(path)
    compare(*results)
    plot(results, args.output / "sleepstudy.png")
    print(f"\nResults and a plot are in {args.output}.")


if __name__ == "__main__":
    main()
