"""Gaussian or heavy-tailed noise? The paper's selection of an error model.

Data come from a regression with Gaussian or with Student-t errors. Both models are fitted
and the one with the larger evidence is chosen. ``python examples/paper/error_models.py``
takes a minute or two, ``--full`` 100 trials of each truth and size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import (
    as_float,
    ascend,
    fit_many,
    load,
    parse,
    save,
    table,
    vectorise,
)
from jax import lax, random
from jax.scipy.special import logsumexp
from matplotlib.figure import Figure
from numpyro.distributions import constraints

from numpyro_jala import JALAEM

DIM = 8
NUM_PARTICLES = 50  # in the paper
DEGREES = (0.2, 5.0)  # of freedom: the range that keeps the two models apart
TRUE_DEGREES = 4.0
#: Per cent of trials in which the paper found the true model, with 500 data.
PAPER = {"gaussian": 100, "student": 99}


def gaussian(features, y):
    """Regression with normal errors."""
    variance, precision = _scales()
    w = numpyro.sample("w", _prior(precision))
    numpyro.sample("y", dist.Normal(features @ w, variance**0.5), obs=y)


def student(features, y):
    """Regression with Student-t errors.

    The weak prior of the degrees of freedom counts from the upper end of their range, where
    the paper's evidence starts: it has a say in the estimate and none in the comparison.
    """
    variance, precision = _scales()
    within = constraints.interval(*DEGREES)
    degrees = numpyro.param("degrees", 0.99 * DEGREES[1], constraint=within)
    numpyro.factor("prior_of_degrees", -0.1 * (degrees - DEGREES[1]))
    w = numpyro.sample("w", _prior(precision))
    errors = dist.StudentT(degrees, features @ w, variance**0.5)
    numpyro.sample("y", errors, obs=y)


MODELS = {"gaussian": gaussian, "student": student}


def _scales():
    return tuple(
        numpyro.param(name, np.e, constraint=constraints.positive)
        for name in ("variance", "precision")
    )


def _prior(precision):
    return dist.Normal(jnp.zeros(DIM), precision**-0.5).to_event(1)


def simulate(rng, truth, size, num_trials):
    """Return features, (trials, size, DIM), and outcomes."""
    features = rng.normal(size=(num_trials, size, DIM))
    w = rng.normal(size=(num_trials, DIM))
    errors = rng.normal(size=(num_trials, size))
    if truth == "student":
        shrink = rng.chisquare(TRUE_DEGREES, size=(num_trials, size)) / TRUE_DEGREES
        errors = errors / np.sqrt(shrink)
    return features, np.einsum("tsd,td->ts", features, w) + errors


# -- the paper's way ------------------------------------------------------------------------


def gaussian_posterior(features, y):
    """Return mean and root of the precision of the weights at the first parameters."""
    precision = features.T @ features / jnp.e + jnp.e * jnp.eye(DIM)
    root = jnp.linalg.cholesky(precision)
    mean = jax.scipy.linalg.cho_solve((root, True), features.T @ y / jnp.e)
    return mean, root


def draw_gaussian(rng_key, features, y, num_draws):
    """Return posterior draws under normal errors, and their log-density."""
    mean, root = gaussian_posterior(features, y)
    noise = random.normal(rng_key, (num_draws, DIM))
    shifts = jax.scipy.linalg.solve_triangular(root.T, noise.T).T
    log_root = jnp.sum(jnp.log(jnp.diagonal(root)))
    normal = dist.Normal(0, 1).log_prob(noise).sum(-1)
    return mean + shifts, normal + log_root


def log_joint(truth, features, y, w):
    """Return log p(y, w) at the first parameters."""
    residual = y - features @ w
    prior = dist.Normal(0, jnp.e**-0.5).log_prob(w).sum()
    if truth == "gaussian":
        return prior + dist.Normal(0, jnp.e**0.5).log_prob(residual).sum()
    first = 0.99 * DEGREES[1]
    errors = dist.StudentT(first, 0, jnp.e**0.5).log_prob(residual).sum()
    return prior + errors - 0.1 * (first - DEGREES[1])


def short_chain(rng_key, features, y):
    """Return one unadjusted Langevin chain's last state, as the paper draws particles."""
    start_key, chain_key = random.split(rng_key)
    gradient_fn = jax.grad(lambda w: log_joint("student", features, y, w))

    def move(carry, key):
        w, size = carry
        gradient = gradient_fn(w)
        norm = jnp.linalg.norm(gradient)
        w = w + size * gradient + jnp.sqrt(2 * size) * random.normal(key, w.shape)
        smaller = (norm > 1000 * DIM) & (size > 1e-6)
        larger = (norm < 10 * DIM) & (size < 0.1)
        return (w, size * jnp.where(smaller, 0.9, jnp.where(larger, 1.05, 1.0))), None

    first = jnp.e**-0.5 * random.normal(start_key, (DIM,))
    keys = random.split(chain_key, 200)
    return lax.scan(move, (first, jnp.asarray(1e-3)), keys)[0][0]


def begin(rng_key, name, by_chains, features, y):
    """Return particles and the log-evidence at the first parameters."""
    draw_key, pick_key = random.split(rng_key)
    draws, log_density = draw_gaussian(draw_key, features, y, 5_000)
    joint = jax.vmap(lambda w: log_joint(name, features, y, w))(draws)
    log_weight = joint - log_density
    log_evidence = logsumexp(log_weight) - jnp.log(len(draws))
    keys = random.split(pick_key, NUM_PARTICLES)
    if name == "student" and by_chains:
        particles = jax.vmap(lambda key: short_chain(key, features, y))(keys)
    else:  # the draws are exact for normal errors, and nearly so once resampled
        chosen = jax.vmap(lambda key: random.categorical(key, log_weight))(keys)
        particles = draws[chosen]
    return particles, log_evidence


def printed_fit(name, by_chains):
    """Return the paper's algorithm with its settings, for one of the models.

    With ``by_chains`` the particles of the Student model start as the paper draws them.
    """
    jala = JALAEM(
        MODELS[name],
        optax.adam(5e-3),
        num_particles=NUM_PARTICLES,
        num_islands=1,
        step_size=5e-5,
        preconditioner=None,
        components="joint",
        ess_threshold=0.0,
    )

    def fit(rng_key, features, y):
        begin_key, init_key = random.split(rng_key)
        particles, log_evidence = begin(begin_key, name, by_chains, features, y)
        state = jala.init(
            init_key,
            features,
            y,
            init_particles={"w": particles},
            init_log_evidence=log_evidence,
        )
        _, infos = ascend(jala, state, 250, features, y)
        return infos.log_evidence

    return vectorise(fit)


def default_fit(name, num_steps):
    """Return a fit from the prior with nothing tuned."""
    jala = JALAEM(MODELS[name])

    def fit(rng_key, features, y):
        state = jala.init(rng_key, features, y)
        state, _ = ascend(jala, state, num_steps, features, y)
        return jala.finish(state, features, y)._replace(state=None)

    return vectorise(fit)


# -- the experiment -------------------------------------------------------------------------


def measure(options, fits, truth, size):
    """Fit both models to the trials of one truth, both ways."""
    rng = np.random.default_rng([options.seed, size, truth == "student"])
    data = as_float(*simulate(rng, truth, size, options.trials))
    label = f"{truth} truth, {size} data"

    def run(kind, name):
        title = f"{label}: {name} model, {kind}"
        return fit_many(fits[kind, name], options.seed, data, options.batch, title)

    # Particles of the Gaussian model are exact draws either way.
    both = run("exact start", "gaussian")
    paths = {
        kind: {"gaussian": both, "student": run(kind, "student")}
        for kind in ("printed", "exact start")
    }
    default = {name: run("default", name) for name in MODELS}
    other = next(name for name in MODELS if name != truth)
    margins = {
        kind: path[truth][:, -1] - path[other][:, -1] for kind, path in paths.items()
    }
    margins["default"] = default[truth].log_evidence - default[other].log_evidence
    errors = np.hypot(default[truth].standard_error, default[other].standard_error)
    found = {
        "truth": truth,
        "size": size,
        "trials": options.trials,
        "margin": {kind: m.tolist() for kind, m in margins.items()},
        "margin_se": errors.tolist(),
        "paths": {name: path[0].tolist() for name, path in paths["exact start"].items()},
    }
    save(options, f"truth_{truth}_{size}_{options.seed}", found)


def merge(parts):
    """Join the parts of each truth and size, which differ in their seeds."""
    cells = {}
    for part in parts:
        cells.setdefault((part["truth"], part["size"]), []).append(part)
    return [
        {
            "truth": truth,
            "size": size,
            "margin": {
                kind: np.concatenate([part["margin"][kind] for part in together])
                for kind in together[0]["margin"]
            },
            "paths": together[0]["paths"],
        }
        for (truth, size), together in cells.items()
    ]


def plot(cells, path):
    """Draw the evidence along one fit of each model, and the margins of all trials."""
    figure = Figure(figsize=(9, 3.2 * len(cells)), layout="constrained")
    for (left, right), cell in zip(
        figure.subplots(len(cells), 2, squeeze=False), cells, strict=True
    ):
        for name, values in cell["paths"].items():
            left.plot(values, label=f"{name} model")
        left.set(
            title=f"truth {cell['truth']}, {cell['size']} data: first trial",
            xlabel="step",
            ylabel="log-evidence",
        )
        left.legend()
        labels = {"exact start": "paper's, from exact draws", "default": "defaults"}
        for kind, label in labels.items():
            right.hist(cell["margin"][kind], bins=20, alpha=0.6, label=label)
        right.axvline(0, color="black", lw=1)
        right.set(title="all trials", xlabel="log Bayes factor for the truth")
        right.legend()
    figure.savefig(path, dpi=130)


def draw(folder):
    """Draw the figure of all that lies in a folder."""
    plot(merge(load(folder, "truth_*.json")), folder / "error_models.png")


def tables(folder):
    """Return the table of all that lies in a folder."""
    cells = merge(load(folder, "truth_*.json"))
    rows = [
        [
            cell["truth"],
            cell["size"],
            *(f"{np.sum(m > 0)} of {len(m)}" for m in cell["margin"].values()),
            f"{PAPER[cell['truth']]} %" if cell["size"] == 500 else "",
        ]
        for cell in cells
    ]
    heads = ["truth", "data", "paper's settings", "from exact draws", "defaults", "paper"]
    return table(heads, rows)


def main():
    full = {"trials": 100, "sizes": "500,1500"}
    options = parse(
        __doc__, "error_models", full, trials=5, steps=60, batch=25, sizes="500"
    )
    fits = {("printed", "student"): printed_fit("student", True)}
    fits |= {("exact start", name): printed_fit(name, False) for name in MODELS}
    fits |= {("default", name): default_fit(name, options.steps) for name in MODELS}
    for size in map(int, options.sizes.split(",")):
        for truth in MODELS:
            measure(options, fits, truth, size)
    draw(options.output)
    print(tables(options.output))


if __name__ == "__main__":
    main()
