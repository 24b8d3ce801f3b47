"""A Bayesian neural network on handwritten digits: the paper's last experiment.

The scales of both layers' priors are estimated. First all algorithms run as in the paper,
with a step size of 0.1 for everything; then JALAEM goes a path on which its weights stay
alive, and compares networks of different widths by their evidence. ``python
examples/paper/networks.py`` trains a small network in two minutes; ``--full`` is for a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from common import DATA, load, parse, save, table, vectorise
from jax import lax, random
from matplotlib.figure import Figure
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam

from numpyro_jala import JALAEM, PGD, SOUL, divide_scores
from numpyro_jala.engine import smc
from numpyro_jala.engine.partition import joint
from numpyro_jala.engine.resampling import systematic

STEP = 0.1
RESAMPLE_BELOW = 1 / 1.05
#: The paper clips gradients "for significantly large norms" and does not say which. In
#: the first steps, which throw the weights far, those of theta are in the hundreds.
LARGEST_NORM = 1.0
NUM_PIXELS = 784
#: Test error in per cent and its standard deviation, four digits, by hidden units.
PAPER = {
    40: {"PGD": (4.74, 0.34), "JALA-EM": (9.24, 0.93), "SOUL": (9.20, 1.27)},
    512: {"PGD": (4.98, 0.42), "JALA-EM": (7.20, 0.81), "SOUL": (8.02, 1.02)},
}


def network(first, second, x):
    """Return the logits of a network of two layers without biases."""
    return jnp.tanh(x @ first) @ second


def make_model(num_units, num_classes):
    """Return the model: normal weights with a scale for each layer."""

    def model(x, labels):
        scales = [jnp.exp(numpyro.param(name, 0.0)) for name in ("alpha", "beta")]
        shapes = [(NUM_PIXELS, num_units), (num_units, num_classes)]
        layers = [
            numpyro.sample(name, dist.Normal(jnp.zeros(shape), scale).to_event(2))
            for name, shape, scale in zip(("first", "second"), shapes, scales, strict=True)
        ]
        logits = network(*layers, x)
        numpyro.sample("labels", dist.Categorical(logits=logits), obs=labels)

    return model


# -- data -----------------------------------------------------------------------------------


def read_data(rng, digits, num_images):
    """Return a stratified draw of images, standardised by pixel, four fifths to train on."""
    with np.load(DATA / "mnist_2479.npz") as file:
        images, labels = file["images"].reshape(-1, NUM_PIXELS), file["labels"]
    each = num_images // len(digits)
    rows = np.stack(
        [rng.choice(np.flatnonzero(labels == digit), each, False) for digit in digits]
    )
    x = images[rows].astype(np.float64)
    spread = x.std((0, 1))
    x = (x - x.mean((0, 1))) / np.where(spread > 0, spread, 1.0)
    classes = np.broadcast_to(np.arange(len(digits))[:, None], rows.shape)
    cut = each * 4 // 5
    parts = x[:, :cut], classes[:, :cut], x[:, cut:], classes[:, cut:]
    x, labels, new_x, new_labels = (part.reshape(-1, *part.shape[2:]) for part in parts)
    return x.astype(np.float32), labels, new_x.astype(np.float32), new_labels


# -- as in the paper ------------------------------------------------------------------------


def judge(first, second, weight, x, labels):
    """Return the test error and the mean log predictive density (LPPD)."""
    each = jax.vmap(lambda a, b: jax.nn.softmax(network(a, b, x)))(first, second)
    chance = jnp.einsum("n,nic->ic", weight, each)
    right = jnp.take_along_axis(chance, labels[:, None], 1)[:, 0]
    log_chance = jnp.log(jnp.maximum(right, 1e-30))
    return jnp.mean(chance.argmax(-1) != labels), jnp.mean(log_chance)


def layers_of(position, num_units, num_classes):
    """Cut flat particles into the weights of both layers, in the order of their names."""
    cut = NUM_PIXELS * num_units
    num_particles = len(position)
    return (
        position[:, :cut].reshape(num_particles, NUM_PIXELS, num_units),
        position[:, cut:].reshape(num_particles, num_units, num_classes),
    )


def algorithms(num_units, num_classes, num_particles):
    """Return the three algorithms with the paper's settings."""
    model = make_model(num_units, num_classes)
    sizes = {"alpha": NUM_PIXELS * num_units, "beta": num_units * num_classes}
    clip = optax.clip_by_global_norm(LARGEST_NORM)
    optim = optax.chain(divide_scores(sizes), clip, optax.sgd(STEP))
    jala = JALAEM(
        model,
        optim,
        num_particles=num_particles,
        num_islands=1,
        step_size=STEP,
        preconditioner=None,
        components="joint",
        ess_threshold=0.0,  # it is resampled below
    )
    baselines = {
        kind.__name__: kind(model, optim, step_size=STEP, num_particles=num_particles)
        for kind in (PGD, SOUL)
    }
    return {"JALA-EM": jala, **baselines}


def resample(state):
    """Resample the particles that the last step moved, if their ESS is low."""
    cloud = state.cloud
    due = smc.is_due(cloud, RESAMPLE_BELOW)
    rng_key = random.fold_in(state.rng_key, 1)
    whole = joint(cloud.position.shape[-1])
    return state._replace(cloud=smc.resample(rng_key, whole, cloud, systematic, due))


def trainer(algorithm, num_units, num_classes, num_chunks):
    """Return a function that trains by chunks of ten steps and judges after each.

    The paper's predictions give all particles the same weight. Here that is the cloud as
    it moved, before its resampling. Beside it stand predictions with the weights.
    """
    num_particles = algorithm.num_particles
    is_weighted = isinstance(algorithm, JALAEM)

    def begin(rng_key, x, labels):
        if not is_weighted:
            return algorithm.init(rng_key, x, labels)
        first_key, second_key, init_key = random.split(rng_key, 3)
        shapes = (NUM_PIXELS, num_units), (num_units, num_classes)
        drawn = {
            "first": random.normal(first_key, (num_particles, *shapes[0])),
            "second": random.normal(second_key, (num_particles, *shapes[1])),
        }
        return algorithm.init(init_key, x, labels, init_particles=drawn)

    def look(state, info, new_x, new_labels):
        equal = jnp.full(num_particles, 1 / num_particles)
        if is_weighted:
            position, params = state.cloud.position[0], state.target.params
            weight, ess = jax.nn.softmax(state.cloud.log_weight[0, 0]), info.ess
        else:
            position, params = state.position[0], state.params
            weight, ess = equal, jnp.ones(())
        layers = layers_of(position, num_units, num_classes)
        error, lppd = judge(*layers, equal, new_x, new_labels)
        weighted_error, _ = judge(*layers, weight, new_x, new_labels)
        return error, lppd, weighted_error, params, ess

    def train(rng_key, x, labels, new_x, new_labels):
        def chunk(state, _):
            def step(state, _):
                state = resample(state) if is_weighted else state
                return algorithm.update(state, x, labels)

            state, infos = lax.scan(step, state, length=10)
            last = jax.tree.map(lambda leaf: leaf[-1], infos)
            return state, look(state, last, new_x, new_labels)

        state = begin(rng_key, x, labels)
        return lax.scan(chunk, state, length=num_chunks)[1]

    return vectorise(train)


def as_printed(options, digits, num_units, num_particles, num_images):
    """Train with all three algorithms, repeatedly, and keep what was seen.

    Repeats differ in their random numbers and not in their images: the paper's errors
    differ by less than those on several draws of 500 images would.
    """
    parts = read_data(np.random.default_rng(options.seed), digits, num_images)
    data = tuple(np.stack([part] * options.repeats) for part in parts)
    keys = random.split(random.key(options.seed), options.repeats)
    found = {}
    for name, algorithm in algorithms(num_units, len(digits), num_particles).items():
        print(f"{name}, {num_units} units, digits {digits}")
        train = trainer(algorithm, num_units, len(digits), options.steps // 10)
        error, lppd, weighted, params, ess = jax.device_get(train((keys, *data)))
        found[name] = {
            "error": np.asarray(error, float).tolist(),
            "weighted_error": np.asarray(weighted, float).tolist(),
            "lppd": np.asarray(lppd, float).tolist(),
            "theta": np.asarray(params[0], float).tolist(),
            "ess": np.asarray(ess, float).tolist(),
        }
    part = {
        "digits": digits,
        "num_units": num_units,
        "num_particles": num_particles,
        "algorithms": found,
    }
    save(options, f"printed_{''.join(map(str, digits))}_{num_units}", part)


# -- our way --------------------------------------------------------------------------------


def standardised(model):
    """Return the model with the first layer's weights in units of their scale.

    They are tens of thousands, mostly free, which would all have to follow their scale.
    Those of the second layer are few, and fixed by the data whatever their scale is.
    """
    return reparam(model, config={"first": LocScaleReparam(0)})


def start_params(num_units):
    """Return the scales with which a network starts that is not Bayesian, by width."""
    return {
        "alpha": -0.5 * float(np.log(NUM_PIXELS)),
        "beta": -0.5 * float(np.log(num_units)),
    }


def alive(options, num_units):
    """Fit one width, then anneal slowly at the estimate; keep error and evidence.

    Repeats differ in their random numbers and not in their data. Narrow networks, whose
    posterior falls into more separate parts, have more particles, which cost as much.
    """
    digits = [int(digit) for digit in options.digits]
    rng = np.random.default_rng(options.seed)
    x, labels, *new = read_data(rng, digits, options.images)
    model = standardised(make_model(num_units, len(digits)))
    num_particles = options.particles * max(20 // num_units, 1)
    kwargs = {"num_particles": num_particles, "num_islands": options.islands}
    fit = JALAEM(model, annealing_effort=options.fit_effort, **kwargs)
    slow = JALAEM(model, annealing_effort=options.annealing_effort, **kwargs)
    first = start_params(num_units)
    for repeat in range(options.first_repeat, options.repeats):
        seed = 1_000 * options.seed + repeat
        fit.run(random.key(seed), options.fit_steps, x, labels, init_params=first)
        result = slow.run(random.key(seed + 500), 0, x, labels, init_params=fit.params)
        found = {"num_units": num_units, "num_particles": num_particles, "repeat": repeat}
        found |= describe(slow, result, new)
        save(options, f"alive_{num_units:03d}_{repeat}", found)


def describe(slow, result, new):
    """Return what a slow path found: errors on new data, evidence, and its health."""
    samples, log_weight = slow.get_weighted_samples()
    error, lppd = judge(samples["first"], samples["second"], np.exp(log_weight), *new)
    return {
        "error": float(error),
        "lppd": float(lppd),
        "params": {name: float(value) for name, value in slow.params.items()},
        "islands": result["sample_stats"]["log_marginal_likelihood"].values.tolist(),
        "median_lowest_ess": float(result["anneal_trace"]["ess_lowest"].median()),
        "num_moves": int(result["anneal_trace"].sizes["step"]),
        "log_evidence": slow.log_evidence,
        "log_evidence_se": slow.log_evidence_se,
    }


# -- pictures and tables --------------------------------------------------------------------


def plot_printed(parts, path):
    """Draw error, log predictive density, theta and ESS along the steps."""
    figure = Figure(figsize=(15, 3.2 * len(parts)), layout="constrained")
    for row, part in zip(figure.subplots(len(parts), 4, squeeze=False), parts, strict=True):
        for name, found in part["algorithms"].items():
            steps = 10 * np.arange(1, len(found["error"][0]) + 1)
            (line,) = row[0].plot(steps, np.mean(found["error"], 0), label=name)
            row[1].plot(steps, np.mean(found["lppd"], 0))
            for column, style in zip(np.transpose(found["theta"]), "-:", strict=True):
                row[2].plot(steps, column, style, color=line.get_color())
        row[3].plot(steps, np.mean(part["algorithms"]["JALA-EM"]["ess"], 0))
        digits = ", ".join(map(str, part["digits"]))
        row[0].set(title=f"digits {digits}, {part['num_units']} units", ylabel="error")
        row[0].legend(fontsize="small")
        row[1].set(ylabel="log predictive density")
        row[2].set(ylabel="α (line) and β (dots), first repeat")
        row[3].set(ylabel="ESS of JALA-EM", ylim=(0, 1))
        for axis in row:
            axis.set_xlabel("step")
    figure.savefig(path, dpi=130)


def plot_alive(parts, path):
    """Draw the evidence of each width, a line for each repeat."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axis = figure.subplots()
    for repeat in sorted({part["repeat"] for part in parts}):
        here = [part for part in parts if part["repeat"] == repeat]
        axis.errorbar(
            [part["num_units"] for part in here],
            [part["log_evidence"] for part in here],
            [part["log_evidence_se"] for part in here],
            marker="o",
            label=f"repeat {repeat}",
        )
    axis.set(xlabel="hidden units", ylabel="log-evidence", xscale="log")
    widths = sorted({part["num_units"] for part in parts})
    axis.set_xticks(widths, map(str, widths))
    axis.minorticks_off()
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def draw(folder):
    """Draw the figures of what lies in a folder."""
    for name, plot in {"printed": plot_printed, "alive": plot_alive}.items():
        parts = load(folder, f"{name}_*.json")
        if parts:
            plot(parts, folder / f"{name}.png")


def printed_row(part, name, found):
    """Describe one algorithm's repeats, beside the paper's numbers."""
    error, weighted = (
        100 * np.asarray(found[key])[:, -1] for key in ("error", "weighted_error")
    )
    spread = error.std(ddof=1) if len(error) > 1 else float("nan")
    known = PAPER.get(part["num_units"], {}).get(name)
    has_paper = known and len(part["digits"]) == 4
    return [
        "".join(map(str, part["digits"])),
        part["num_units"],
        name,
        f"{error.mean():.2f} ({spread:.2f})",
        f"{known[0]:.2f} ({known[1]:.2f})" if has_paper else "",
        f"{weighted.mean():.2f}",
        f"{np.mean(np.asarray(found['lppd'])[:, -1]):.3f}",
        f"{np.median(found['ess']):.3f}",
    ]


def alive_row(part):
    """Describe one fit whose weights were kept alive."""
    return [
        part["num_units"],
        part["repeat"],
        f"{100 * part['error']:.2f}",
        f"{part['lppd']:.3f}",
        *(f"{value:.2f}" for value in part["params"].values()),
        f"{part['log_evidence']:.2f} ± {part['log_evidence_se']:.2f}",
        f"{np.ptp(part['islands']):.2f}",
        f"{part['median_lowest_ess']:.2f}",
        part["num_moves"],
    ]


def tables(folder):
    """Return the tables of what lies in a folder."""
    found = []
    printed = load(folder, "printed_*.json")
    if printed:
        rows = [
            printed_row(part, name, found)
            for part in printed
            for name, found in part["algorithms"].items()
        ]
        heads = ["digits", "units", "algorithm", "error, %", "paper", "weighted error"]
        found.append(table([*heads, "LPPD", "ESS"], rows))
    heads = ["units", "repeat", "error, %", "LPPD", "α", "β", "log-evidence"]
    heads += ["islands' range", "ESS", "moves"]
    for pattern in ("alive_*.json", "slower/alive_*.json"):
        alive = load(folder, pattern)
        if alive:
            found.append(table(heads, [alive_row(part) for part in alive]))
    return "\n".join(found)


def main():
    full = {"steps": 500, "repeats": 0, "images": 0, "printed_particles": 0}
    full |= {
        "annealing_effort": 40.0,
        "fit_effort": 6.0,
        "particles": 1024,
        "fit_steps": 400,
    }
    options = parse(
        __doc__,
        "networks",
        full,
        parts="printed,alive",
        digits="49",
        units="5",
        images=200,
        repeats=1,
        first_repeat=0,
        steps=100,
        printed_particles=20,
        particles=16,
        islands=4,
        fit_steps=20,
        fit_effort=1.0,
        annealing_effort=4.0,
    )
    # What the paper has depends on the digits.
    num_images, num_particles = (1_000, 100) if options.digits == "49" else (2_500, 50)
    options.images = options.images or num_images
    options.printed_particles = options.printed_particles or num_particles
    options.repeats = options.repeats or (10 if "printed" in options.parts else 5)
    digits = [int(digit) for digit in options.digits]
    for num_units in (int(n) for n in options.units.split(",")):
        if "printed" in options.parts:
            as_printed(
                options, digits, num_units, options.printed_particles, options.images
            )
        if "alive" in options.parts:
            alive(options, num_units)
    draw(options.output)
    print(tables(options.output))


if __name__ == "__main__":
    main()
