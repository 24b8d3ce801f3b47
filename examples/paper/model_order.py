"""Which polynomial made these data? The paper's selection of a model's order.

Data come from polynomials of order 2 to 8 with noise, and polynomials of order 1 to 10 are
fitted: the one with the largest evidence is chosen. Beside it stand the choice by BIC
after least squares, what the paper reports for both, and the choice by the exact evidence
at its exact maximum, which is in closed form here: no method that compares evidences can be
expected to do better.

``python examples/paper/model_order.py`` takes a minute or two, ``--full`` takes hours on
two cores: 100 trials of each cell. With ``--orders`` and ``--sizes`` several processes can
share the cells; the table and the figure are made of all that lies in the output folder.
"""

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
from matplotlib.figure import Figure
from numpyro.distributions import constraints

from numpyro_jala import JALAEM

ORDERS = np.arange(1, 11)
NUM_COLUMNS = 11
VARIANCE = 7.5
#: The paper's table: mean absolute error of the order, by true order and data size, of
#: JALA-EM and of least squares with BIC.
PAPER = {
    2: ([0.67, 0.45, 0.35], [0.64, 0.46, 0.35]),
    3: ([0.73, 0.41, 0.25], [0.90, 0.42, 0.34]),
    4: ([0.73, 0.49, 0.30], [0.80, 0.60, 0.30]),
    5: ([0.51, 0.40, 0.27], [0.64, 0.42, 0.35]),
    6: ([0.35, 0.31, 0.18], [0.49, 0.32, 0.23]),
    7: ([0.23, 0.15, 0.09], [0.44, 0.28, 0.15]),
    8: ([0.28, 0.19, 0.13], [0.37, 0.30, 0.20]),
}
SIZES = [100, 250, 500]


def model(features, y):
    """Weights with a common precision, which is estimated, as is the noise."""
    variance, precision = (
        numpyro.param(name, np.e, constraint=constraints.positive)
        for name in ("variance", "precision")
    )
    prior = dist.Normal(jnp.zeros(NUM_COLUMNS), precision**-0.5)
    w = numpyro.sample("w", prior.to_event(1))
    numpyro.sample("y", dist.Normal(features @ w, variance**0.5), obs=y)


def simulate(rng, order, size, variance, num_trials):
    """Return powers of the inputs, (trials, size, columns), and outcomes."""
    powers = rng.uniform(-2.5, 2.5, (num_trials, size, 1)) ** np.arange(NUM_COLUMNS)
    w = rng.normal(size=(num_trials, NUM_COLUMNS)) * (np.arange(NUM_COLUMNS) <= order)
    noise = variance**0.5 * rng.normal(size=(num_trials, size))
    return powers, np.einsum("tsc,tc->ts", powers, w) + noise


def candidates(powers, y):
    """Pair every data set with every order.

    Columns above the order are zero: their weights keep their prior, which integrates to
    one, so the evidence is that of the smaller model and one shape serves all.
    """
    kept = np.arange(NUM_COLUMNS) <= ORDERS[:, None]
    features = powers[:, None] * kept[:, None]
    num_all = len(powers) * len(ORDERS)
    return features.reshape(num_all, *powers.shape[1:]), np.repeat(y, len(ORDERS), 0)


def bic(powers, y):
    """Return the criterion of every order after least squares, (trials, orders)."""
    columns = []
    for order in ORDERS:
        root, _ = np.linalg.qr(powers[..., : order + 1])
        fitted = np.einsum("tsc,tkc,tk->ts", root, root, y)
        variance = np.mean((y - fitted) ** 2, -1)
        log_likelihood = -0.5 * y.shape[1] * (np.log(2 * np.pi * variance) + 1)
        columns.append((order + 2) * np.log(y.shape[1]) - 2 * log_likelihood)
    return np.stack(columns, -1)


def exact_maximum(features, y):
    """Return the largest evidence over both parameters.

    With the ratio of prior to noise variance given, the best noise variance is in closed
    form; the ratio is searched on a grid, which then shrinks around the best point.
    """
    size = y.shape[1]
    left, values, _ = np.linalg.svd(features, full_matrices=False)
    inner = np.einsum("tsc,ts->tc", left, y)
    rest = np.sum(y**2, -1) - np.sum(inner**2, -1)

    def profile(log_ratio):
        growth = 1 + values[:, None] ** 2 * np.exp(log_ratio)[..., None]
        variance = (np.sum(inner[:, None] ** 2 / growth, -1) + rest[:, None]) / size
        logs = size * (np.log(2 * np.pi * variance) + 1) + np.sum(np.log(growth), -1)
        return -0.5 * logs

    centre, width = np.full(len(y), 0.0), 30.0
    for _ in range(5):
        grid = centre[:, None] + width * np.linspace(-1, 1, 201)
        found = profile(grid)
        best = found.argmax(-1)
        centre, width = grid[np.arange(len(y)), best], width / 50
    return found.max(-1)


def posterior_start(rng, features, y, num_particles):
    """Return exact posterior draws at the first parameters, and the log-evidence there."""
    variance, precision = np.e, np.e
    identity = np.eye(NUM_COLUMNS)
    curvature = np.einsum("tsc,tsd->tcd", features, features) / variance
    root = np.linalg.cholesky(curvature + precision * identity)
    pull = np.einsum("tsc,ts->tc", features, y) / variance
    flat = np.linalg.solve(root, pull[..., None])
    mean = np.linalg.solve(root.swapaxes(1, 2), flat)
    noise = rng.normal(size=(len(y), NUM_COLUMNS, num_particles))
    draws = mean + np.linalg.solve(root.swapaxes(1, 2), noise)
    log_roots = np.sum(np.log(np.diagonal(root, axis1=1, axis2=2)), -1)
    log_prior = 0.5 * NUM_COLUMNS * np.log(precision)
    fit = np.sum(y**2, -1) / variance - np.sum(flat[..., 0] ** 2, -1)
    size = y.shape[1]
    constant = -0.5 * size * np.log(2 * np.pi * variance)
    return draws.swapaxes(1, 2), constant + log_prior - log_roots - 0.5 * fit


def printed_fit():
    """Return the paper's algorithm with its settings."""
    jala = JALAEM(
        model,
        optax.adam(5e-3),
        num_particles=50,
        num_islands=1,
        step_size=1e-6,
        preconditioner=None,
        components="joint",
        ess_threshold=0.0,
    )

    def fit(rng_key, features, y, particles, log_evidence):
        state = jala.init(
            rng_key,
            features,
            y,
            init_particles={"w": particles},
            init_log_evidence=log_evidence,
        )
        state, _ = ascend(jala, state, 200, features, y)
        return jala.evaluate(state)

    return vectorise(fit)


def default_fit(num_steps):
    """Return a fit from the prior with nothing tuned, and few particles for speed."""
    jala = JALAEM(model, num_particles=128)

    def fit(rng_key, features, y):
        state = jala.init(rng_key, features, y)
        state, _ = ascend(jala, state, num_steps, features, y)
        return jala.finish(state, features, y)._replace(state=None)

    return vectorise(fit)


def choose(log_evidence):
    """Return each trial's order of largest evidence; what is not a number loses."""
    values = np.where(np.isfinite(log_evidence), log_evidence, -np.inf)
    return ORDERS[values.reshape(-1, len(ORDERS)).argmax(-1)]


def measure(options, fits, order, size):
    """Run all methods on the trials of one cell of the table."""
    rng = np.random.default_rng([options.seed, order, size])
    powers, y = simulate(rng, order, size, options.variance, options.trials)
    features, repeated = candidates(powers, y)
    exact = exact_maximum(features, repeated)
    started = posterior_start(rng, features, repeated, 50)
    data = as_float(features, repeated)
    seed, batch, name = options.seed, options.batch, f"order {order}, {size} data"
    default = fit_many(fits["default"], seed, data, batch, name)
    data += as_float(*started)
    printed = fit_many(fits["printed"], seed, data, batch, name + ", as printed")
    chosen = {
        "jala": choose(default.log_evidence),
        "exact": choose(exact),
        "bic": ORDERS[bic(powers, y).argmin(-1)],
        "printed": choose(printed),
    }
    found = {
        "order": order,
        "size": size,
        "variance": options.variance,
        "chosen": {name: orders.tolist() for name, orders in chosen.items()},
        "log_evidence_error": (default.log_evidence - exact).tolist(),
        "log_evidence_se": default.standard_error.tolist(),
    }
    save(options, f"order_{order}_{size}_{options.seed}", found)


def summarise(parts):
    """Put the trials of each cell together, and average the error of the order."""
    cells = []
    for size in SIZES:
        for order in PAPER:
            here = [p for p in parts if (p["order"], p["size"]) == (order, size)]
            if not here:
                continue
            cell = {"order": order, "size": size}
            for name in here[0]["chosen"]:
                orders = np.concatenate([part["chosen"][name] for part in here])
                error = np.abs(orders - order)
                cell[name] = error.mean()
                cell[f"{name}_se"] = error.std(ddof=1) / np.sqrt(error.size)
            jala, exact = (
                np.concatenate([part["chosen"][name] for part in here])
                for name in ("jala", "exact")
            )
            cell["same"] = np.mean(jala == exact)
            cell["trials"] = jala.size
            cell["paper"], cell["paper_bic"] = (
                row[SIZES.index(size)] for row in PAPER[order]
            )
            cells.append(cell)
    return cells


def plot(cells, path):
    """Draw the error of every method against the true order, by data size."""
    sizes = sorted({cell["size"] for cell in cells})
    figure = Figure(figsize=(4 * len(sizes), 3.4), layout="constrained")
    axes = figure.subplots(1, len(sizes), sharey=True, squeeze=False)[0]
    styles = {
        "jala": ("o-", "JALAEM"),
        "exact": ("k--", "exact evidence"),
        "bic": ("s:", "least squares, BIC"),
        "printed": ("x:", "paper's settings"),
        "paper": ("^", "paper's figures"),
    }
    for axis, size in zip(axes, sizes, strict=True):
        here = [cell for cell in cells if cell["size"] == size]
        orders = [cell["order"] for cell in here]
        for name, (style, label) in styles.items():
            axis.plot(orders, [cell[name] for cell in here], style, label=label)
        axis.set(title=f"{size} data", xlabel="true order")
    axes[0].set(ylabel="mean absolute error of the order", ylim=(0, 1.5))
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=130)


def draw(folder):
    """Draw the figure of all that lies in a folder."""
    plot(summarise(load(folder, "order_*.json")), folder / "model_order.png")


def tables(folder):
    """Return the table of all that lies in a folder."""
    cells = summarise(load(folder, "order_*.json"))
    names = ("jala", "exact", "bic", "printed")
    rows = [
        [
            cell["order"],
            cell["size"],
            cell["trials"],
            *(f"{cell[name]:.2f} ± {cell[f'{name}_se']:.2f}" for name in names),
            cell["paper"],
            cell["paper_bic"],
            f"{cell['same']:.0%}",
        ]
        for cell in cells
    ]
    heads = ["order", "data", "trials", "JALAEM", "exact", "BIC", "paper's settings"]
    return table([*heads, "paper", "paper's BIC", "JALAEM as exact"], rows)


def listed(values):
    """Return numbers as an option takes them."""
    return ",".join(map(str, values))


def main():
    everything = {"orders": listed(PAPER), "sizes": listed(SIZES)}
    options = parse(
        __doc__,
        "model_order",
        full={"trials": 100, **everything},
        trials=8,
        steps=60,
        batch=250,
        orders="3,7",
        sizes="100",
        variance=VARIANCE,
    )
    fits = {"default": default_fit(options.steps), "printed": printed_fit()}
    for size in map(int, options.sizes.split(",")):
        for order in map(int, options.orders.split(",")):
            measure(options, fits, order, size)
    draw(options.output)
    print(tables(options.output))


if __name__ == "__main__":
    main()
