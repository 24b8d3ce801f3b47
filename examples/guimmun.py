"""Who gets their children immunised: where Laplace's approximation goes wrong.

Most mothers of the Guatemalan survey (Pebley, Goldman and Rodríguez 1996) have one child in
it, and the answer is yes or no. The likelihood of a mother's effect is then far from normal,
and Laplace's approximation, by which lme4 and glmmTMB integrate it out, finds half of its
standard deviation, without a warning.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpyro.distributions import constraints

from numpyro_jala import JALAEM, datasets

NAMES = ("intercept", "aged two or more", "rural", "share indigenous")
# Nested adaptive Gauss-Hermite quadrature with 61 x 61 nodes in float64, maximised:
# estimates and standard errors.
EXACT = {
    "intercept": (-0.213217, 0.30582),
    "aged two or more": (1.677533, 0.21292),
    "rural": (-1.064927, 0.28386),
    "share indigenous": (-1.658807, 0.35644),
    "sd of mothers": (2.274148, 0.25673),
    "sd of communities": (1.016871, 0.15388),
}
EXACT_LOG_LIKELIHOOD = -1335.050489
# glmmTMB 1.1.5; lme4 gives the same.
LAPLACE = {"sd of mothers": 1.091008, "sd of communities": 0.723569}
LAPLACE_LOG_LIKELIHOOD = -1366.57768
WIDTH = 1.96  # standard errors on either side


def model(x, mother, community, immunised=None):
    """Give each mother and each community an effect on the log odds."""
    beta = numpyro.param("beta", jnp.zeros(x.shape[1]))
    sd_mother = numpyro.param("sd_mother", 1.0, constraint=constraints.positive)
    sd_community = numpyro.param("sd_community", 1.0, constraint=constraints.positive)
    with numpyro.plate("mothers", 1595):
        of_mother = numpyro.sample("of_mother", dist.Normal(0.0, sd_mother))
    with numpyro.plate("communities", 161):
        of_community = numpyro.sample("of_community", dist.Normal(0.0, sd_community))
    logits = x @ beta + of_mother[mother] + of_community[community]
    numpyro.sample("immunised", dist.Bernoulli(logits=logits), obs=immunised)


def model_args():
    """Return the arguments of the model."""
    data = datasets.load_guimmun()
    one = np.ones(len(data.immunised))
    x = np.stack([one, data.aged_two, data.rural, data.indigenous], -1)
    return x, data.mother, data.community, data.immunised


def estimates(jala):
    """Return estimate, standard error and 95 % interval of each quantity by name."""
    sites = {
        **{name: ("beta", (place,)) for place, name in enumerate(NAMES)},
        "sd of mothers": ("sd_mother", ()),
        "sd of communities": ("sd_community", ()),
    }
    errors, intervals = jala.standard_errors(), jala.confidence_intervals(0.95)
    return {
        name: tuple(
            float(number)
            for number in (jala.params[site][at], errors[site][at], *intervals[site][at])
        )
        for name, (site, at) in sites.items()
    }


def report(found, jala):
    """Print what was found beside what is exact, and what Laplace's approximation says."""
    print(f"{'':<20}{'JALAEM':>10}{'s.e.':>8}{'exact':>10}{'s.e.':>8}{'Laplace':>10}")
    for name, (value, error, *_) in found.items():
        exact = "{:>10.3f}{:>8.3f}".format(*EXACT[name])
        laplace = f"{LAPLACE[name]:>10.3f}" if name in LAPLACE else ""
        print(f"{name:<20}{value:>10.3f}{error:>8.3f}{exact}{laplace}")
    print(
        f"{'log-likelihood':<20}{jala.log_evidence:>10.2f}{jala.log_evidence_se:>8.2f}"
        f"{EXACT_LOG_LIKELIHOOD:>10.2f}{'':>8}{LAPLACE_LOG_LIKELIHOOD:>10.2f}"
    )


def plot_quantities(ax, found, names):
    """Draw estimates with 95 % intervals, one row for each name."""
    for row, name in enumerate(names):
        value, _, low, high = found[name]
        ax.plot([low, high], [row - 0.15] * 2, color="C0", lw=2)
        ax.plot(value, row - 0.15, "o", color="C0", label="numpyro_jala")
        exact, error = EXACT[name]
        ax.plot([exact - WIDTH * error, exact + WIDTH * error], [row + 0.15] * 2, "k", lw=1)
        ax.plot(exact, row + 0.15, "k|", ms=12, mew=2, label="exact (quadrature)")
        if name in LAPLACE:
            ax.plot(
                LAPLACE[name], row, "X", color="C3", ms=9, label="lme4, glmmTMB (Laplace)"
            )
    ax.set_yticks(range(len(names)), names)
    ax.margins(y=0.3)
    ax.invert_yaxis()


def plot(found, jala, path):
    """Draw the standard deviations, the log-likelihood and the fixed effects."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplot_mosaic(
        [["scales", "likelihood"], ["fixed", "fixed"]], height_ratios=[1, 1.3]
    )
    plot_quantities(axes["scales"], found, list(LAPLACE))
    axes["scales"].set_xlim(0, None)
    axes["scales"].set_title("how much mothers and communities differ", fontsize="medium")
    ax = axes["likelihood"]
    reach = WIDTH * jala.log_evidence_se
    ax.errorbar(jala.log_evidence, -0.15, xerr=reach, fmt="o", color="C0")
    ax.plot(EXACT_LOG_LIKELIHOOD, 0.15, "k|", ms=12, mew=2)
    ax.plot(LAPLACE_LOG_LIKELIHOOD, 0, "X", color="C3", ms=9)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.1, y=1.0)
    ax.invert_yaxis()
    ax.set_title("log-likelihood at its maximum", fontsize="medium")
    plot_quantities(axes["fixed"], found, NAMES)
    axes["fixed"].axvline(0, color="grey", lw=0.5)
    axes["fixed"].set_title("effects on the log odds of immunisation", fontsize="medium")
    handles, labels = axes["scales"].get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20, help="EM steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("guimmun.png"))
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    jala = JALAEM(model)
    jala.run(jax.random.key(args.seed), args.steps, *model_args())
    found = estimates(jala)
    report(found, jala)
    plot(found, jala, args.output)
    print(f"\nThe picture is in {args.output}.")


if __name__ == "__main__":
    main()
