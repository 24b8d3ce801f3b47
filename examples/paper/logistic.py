"""Bayesian logistic regression on the Wisconsin data: the paper's first experiment.

The weights have a common prior mean, which is estimated. JALA-EM as the paper prints it,
PGD and SOUL have their step sizes tuned by three-fold cross-validation on the paper's grid;
JALAEM by its defaults is not tuned. ``python examples/paper/logistic.py`` takes two
minutes, most of them to compile, and ``--full`` the paper's sizes.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import DATA, ascend, fit_many, load, parse, save, table, vectorise
from jax import random
from matplotlib.figure import Figure
from scipy.stats import gaussian_kde, wasserstein_distance

from numpyro_jala import JALAEM, PGD, SOUL

PRIOR_VARIANCE = 5.0
RATES = [0.05, 0.1, 0.15]
#: Of the likelihood of all 683 rows, by quadrature; good to 0.0002.
MAXIMUM = 0.98686
SHOWN = 1  # the weight that the paper shows, its second
TUNED = ["JALA-EM", "PGD", "SOUL"]
LABELS = [*TUNED, "JALAEM, defaults"]


def model(x, y):
    """Weights around a common mean."""
    theta = numpyro.param("theta", 0.0)
    prior = dist.Normal(theta * jnp.ones(x.shape[1]), PRIOR_VARIANCE**0.5)
    w = numpyro.sample("w", prior.to_event(1))
    numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


# -- data -----------------------------------------------------------------------------------


def read_data():
    """Return standardised features and whether the tumour is malignant."""
    table = np.loadtxt(DATA / "wisconsin.csv", delimiter=",", skiprows=1)
    x, y = table[:, :-1], table[:, -1]
    x = (x - x.mean(0)) / x.std(0)
    return x.astype(np.float32), y.astype(np.float32)


def split(rng, y, share):
    """Return the rows of a stratified share, and the rest."""
    chosen = np.concatenate(
        [
            rng.permutation(np.flatnonzero(y == label))[: round(share * np.sum(y == label))]
            for label in (0, 1)
        ]
    )
    return np.sort(chosen), np.setdiff1d(np.arange(len(y)), chosen)


def folds(rng, y, num_folds):
    """Return pairs of rows to fit and rows to judge by."""
    parts = np.array_split(rng.permutation(len(y)), num_folds)
    size = min(len(part) for part in parts)  # equal shapes compile once
    parts = [part[:size] for part in parts]
    rest = [np.concatenate(parts[:i] + parts[i + 1 :]) for i in range(num_folds)]
    return list(zip(rest, parts, strict=True))


def euler_step(x):
    """Return the step size that the largest possible curvature allows."""
    bound = 0.25 * x.T @ x + np.eye(x.shape[1]) / PRIOR_VARIANCE
    return 0.99 / np.linalg.eigvalsh(bound)[-1]


# -- algorithms: ``fit(rng_key, step_size, rate, x, y) -> path, particles, weights`` --------


def fit_printed(num_particles, num_steps, rng_key, step_size, rate, x, y):
    """Run JALA-EM as printed, its particles drawn from the prior as the paper does."""
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    jala = JALAEM(
        model,
        sgd,
        num_particles=num_particles,
        num_islands=1,
        step_size=1.0,
        preconditioner=None,
        components="joint",
        ess_threshold=1 / 1.05,
    )
    draw_key, init_key = random.split(rng_key)
    shape = (num_particles, x.shape[1])
    first = PRIOR_VARIANCE**0.5 * random.normal(draw_key, shape)
    state = jala.init(init_key, x, y, init_particles={"w": first})
    # Step sizes that differ between the fits of a batch are part of the state.
    optim_state = state.optim_state._replace(hyperparams={"learning_rate": rate})
    size = jnp.log(step_size)[None, None]
    state = state._replace(log_step_size=size, optim_state=optim_state)
    state, infos = ascend(jala, state, num_steps, x, y)
    weight = jax.nn.softmax(state.cloud.log_weight[0, 0])
    return infos.params[:, 0], state.cloud.position[0], weight


def fit_baseline(kind, num_particles, num_steps, rng_key, step_size, rate, x, y):
    """Run PGD, with one step size, or SOUL."""
    optim = None if kind is PGD else optax.sgd(rate)
    baseline = kind(model, optim, step_size=step_size, num_particles=num_particles)
    state = baseline.init(rng_key, x, y)
    state, infos = ascend(baseline, state, num_steps, x, y)
    weight = jnp.full(num_particles, 1 / num_particles)
    return infos.params[:, 0], state.position[0], weight


def fit_default(num_particles, num_steps, rng_key, step_size, rate, x, y):
    """Run JALAEM with nothing tuned; its path ends in its estimate."""
    jala = JALAEM(model, num_particles=num_particles, num_islands=num_particles // 5)
    state = jala.init(rng_key, x, y)
    state, infos = ascend(jala, state, num_steps, x, y)
    fit = jala.finish(state, x, y)
    cloud = fit.state.cloud
    path = jnp.append(infos.params[:, 0], fit.params["theta"])
    weight = jax.nn.softmax(cloud.log_weight, -1) / jala.num_islands
    return path, cloud.position.reshape(num_particles, -1), weight.reshape(-1)


FITS = {
    "JALA-EM": fit_printed,
    "PGD": partial(fit_baseline, PGD),
    "SOUL": partial(fit_baseline, SOUL),
    "JALAEM, defaults": fit_default,
}


# -- tuning ---------------------------------------------------------------------------------


def log_predictive(particles, weight, x, y):
    """Return the mean log predictive density (LPPD) of labels."""
    chance = jax.nn.sigmoid(particles @ x.T)
    right = jnp.where(y > 0, chance, 1 - chance)
    return jnp.mean(jnp.log(jnp.maximum(weight @ right, 1e-30)))


def tune(options, name, num_particles, x, y, rng):
    """Return the step size and rate with the best cross-validated LPPD."""
    sizes = euler_step(x) * np.linspace(0.2, 2.0, options.grid)
    rates = [0.0] if name == "PGD" else RATES
    pairs = folds(rng, y, 3)
    kept, judged = (np.stack(rows) for rows in zip(*pairs, strict=True))
    cases = [(s, r, f) for s in sizes for r in rates for f in range(3)]
    step_size, rate, fold = (np.array(column) for column in zip(*cases, strict=True))

    def judge(rng_key, step_size, rate, x, y, new_x, new_y):
        fit = FITS[name](
            num_particles, options.tuning_steps, rng_key, step_size, rate, x, y
        )
        return log_predictive(*fit[1:], new_x, new_y)

    data = (x[kept][fold], y[kept][fold], x[judged][fold], y[judged][fold])
    numbers = (step_size.astype(np.float32), rate.astype(np.float32))
    label = f"{num_particles} particles: {name} is tuned"
    batch = 3 * options.grid
    found = fit_many(vectorise(judge), options.seed, (*numbers, *data), batch, label)
    score = np.nan_to_num(found, nan=-np.inf).reshape(-1, 3).mean(-1)
    best = 3 * int(score.argmax())
    return {
        "step_size": float(step_size[best]),
        "rate": float(rate[best]),
        "lppd": float(score.max()),
    }


# -- measurements ---------------------------------------------------------------------------


def timed(options, name, num_particles, tuned, data):
    """Return a path of theta against seconds, as long as the time allows."""
    fit = jax.jit(partial(FITS[name], num_particles, options.most_steps))
    numbers = jnp.float32(tuned["step_size"]), jnp.float32(tuned["rate"])
    arguments = (random.key(options.seed), *numbers, *data)
    jax.block_until_ready(fit(*arguments))  # compiles
    start = time.perf_counter()
    path, particles, weight = jax.block_until_ready(fit(*arguments))
    per_step = (time.perf_counter() - start) / options.most_steps
    shown = min(options.most_steps, int(options.seconds / per_step))
    every = -(-shown // 500)
    return {
        "per_step": per_step,
        "every": every,
        "theta": np.asarray(path, float)[:shown:every].tolist(),
        "particles": np.asarray(particles[:, SHOWN], float).tolist(),
        "weight": np.asarray(weight, float).tolist(),
    }


def repeat(options, name, num_particles, tuned, data, reference):
    """Return errors of theta and distances to the posterior over many seeds."""

    def fit(rng_key, _):
        numbers = jnp.float32(tuned["step_size"]), jnp.float32(tuned["rate"])
        num_steps = options.repeat_steps
        path, particles, weight = FITS[name](
            num_particles, num_steps, rng_key, *numbers, *data
        )
        last = path[-1] if name not in TUNED else jnp.mean(path[num_steps // 2 :])
        return last, particles[:, SHOWN], weight

    label = f"{num_particles} particles: {name} is repeated"
    count, batch = np.arange(options.repeats), -(-options.repeats // 5)
    theta, particles, weight = fit_many(
        vectorise(fit), options.seed + 1, (count,), batch, label
    )
    sd = np.std(reference["w"])
    distance = [
        wasserstein_distance(p, reference["w"], u_weights=w) / sd
        for p, w in zip(particles.astype(float), weight.astype(float), strict=True)
    ]
    return {
        "theta_error": (theta.astype(float) - reference["theta"]).tolist(),
        "distance": distance,
    }


def long_run(options, data):
    """Return the maximum and draws from the posterior there, by many particles."""
    jala = JALAEM(model, num_particles=options.reference_particles)
    jala.run(random.key(options.seed), 300, *data)
    return {
        "theta": float(jala.params["theta"]),
        "se": float(jala.standard_errors()["theta"]),
        "w": np.asarray(jala.get_samples()["w"][:, SHOWN], float),
    }


def correction(options, data):
    """Compare averages of theta at a step size that is too large for PGD."""
    results = {}
    for name in ("JALA-EM", "PGD"):

        def fit(rng_key, name=name):
            step = jnp.float32(0.05)
            num_steps = options.correction_steps
            path, *_ = FITS[name](1_000, num_steps, rng_key, step, step, *data)
            return jnp.mean(path[num_steps // 4 :])

        keys = random.split(random.key(options.seed + 2), 8)
        results[name] = np.asarray(vectorise(fit)((keys,)), float).tolist()
    return results


# -- pictures and tables --------------------------------------------------------------------


def plot(parts, path):
    """Draw theta against time and the density of a weight, by number of particles."""
    figure = Figure(figsize=(10, 3 * len(parts)), layout="constrained")
    axes = figure.subplots(len(parts), 2, squeeze=False)
    for (left, right), part in zip(axes, parts, strict=True):
        reference = np.asarray(part["reference"]["w"])
        grid = np.linspace(reference.min(), reference.max(), 200)
        for name, run in part["runs"].items():
            seconds = run["per_step"] * (1 + run["every"] * np.arange(len(run["theta"])))
            (line,) = left.plot(seconds, run["theta"], lw=1, label=name)
            kde = gaussian_kde(run["particles"], weights=run["weight"])
            right.plot(grid, kde(grid), color=line.get_color(), label=name)
        left.axhline(part["reference"]["theta"], color="black", ls=":", lw=1)
        left.set(title=f"{part['num_particles']} particles", xlabel="s", ylabel="θ")
        left.set_xscale("log")
        density = gaussian_kde(reference)(grid)
        right.plot(grid, density, "k--", label="long run")
        # A chain that has not moved far has a peak beyond all others.
        right.set(xlabel="second weight", ylabel="density", ylim=(0, 2.5 * density.max()))
    axes[0, 1].legend(fontsize="small")
    figure.savefig(path, dpi=130)


def draw(folder):
    """Draw the figure of what lies in a folder."""
    parts = load(folder, "particles_*.json")
    if parts:
        plot(parts, folder / "logistic.png")


def tables(folder):
    """Return the tables of what lies in a folder."""
    rows = []
    for part in load(folder, "particles_*.json"):
        for name, found in part["repeats"].items():
            error = np.asarray(found["theta_error"])
            tuned = part["tuned"].get(name, {})
            rows.append(
                [
                    part["num_particles"],
                    name,
                    f"{tuned['step_size']:.2g}" if tuned else "",
                    f"{error.mean():+.4f} ± {error.std(ddof=1) / len(error) ** 0.5:.4f}",
                    f"{np.abs(error).max():.3f}",
                    f"{np.mean(found['distance']):.3f}",
                    f"{1e3 * part['runs'][name]['per_step']:.2f}",
                ]
            )
    heads = ["N", "algorithm", "step size", "error of θ", "worst", "distance", "ms a step"]
    found = table(heads, rows) if rows else ""
    for part in load(folder, "correction.json"):
        rows = []
        for name, values in part["theta"].items():
            mean, se = np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5
            rows.append([name, f"{mean:.4f} ± {se:.4f}", f"{mean - MAXIMUM:+.4f}"])
        found += "\n" + table(["step size 0.05", "mean of θ", "from the maximum"], rows)
    return found


def measure(options, num_particles, data, reference):
    """Tune, time and repeat all algorithms with one number of particles."""
    none = {"step_size": 0.0, "rate": 0.0}
    tuned = {
        name: tune(options, name, num_particles, *data, np.random.default_rng(options.seed))
        for name in TUNED
    }
    chosen = {name: tuned.get(name, none) for name in LABELS}
    found = {
        "num_particles": num_particles,
        "tuned": tuned,
        "reference": {**reference, "w": reference["w"][::8].tolist()},
        "runs": {n: timed(options, n, num_particles, chosen[n], data) for n in LABELS},
        "repeats": {
            n: repeat(options, n, num_particles, chosen[n], data, reference) for n in LABELS
        },
    }
    save(options, f"particles_{num_particles:03d}", found)


def main():
    full = {"grid": 10, "tuning_steps": 500, "seconds": 5.0, "most_steps": 5_000}
    full |= {"repeats": 100, "repeat_steps": 2_000, "reference_particles": 8_192}
    full |= {"parts": "100,50,10,correction"}
    options = parse(
        __doc__,
        "logistic",
        full,
        grid=3,
        tuning_steps=100,
        seconds=0.5,
        most_steps=400,
        repeats=20,
        repeat_steps=400,
        correction_steps=4_000,
        reference_particles=1_024,
        parts="10",
    )
    x, y = read_data()
    rows, _ = split(np.random.default_rng(options.seed), y, 0.8)
    data = (x[rows], y[rows])
    reference = long_run(options, data) if options.parts != "correction" else None
    for part in options.parts.split(","):
        if part != "correction":
            measure(options, int(part), data, reference)
    if "correction" in options.parts:
        save(options, "correction", {"theta": correction(options, (x, y))})
    draw(options.output)
    print(tables(options.output))


if __name__ == "__main__":
    main()
