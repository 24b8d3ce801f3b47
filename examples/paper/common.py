"""What the experiments of the paper share: options, many fits at once, files of results.

The paper is Cuin, Carbone and Akyildiz (2025), "Learning Latent Variable Models via
Jarzynski-adjusted Langevin Algorithm", NeurIPS.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from tqdm.auto import tqdm

from numpyro_jala.backend.versions import version_of

DATA = Path(__file__).parents[1] / "data"
_PACKAGES = ("numpyro_jala", "numpyro", "jax")


def parse(description, output, full, **quick):
    """Read the options that every experiment has, and a few of its own.

    With ``--full`` those have other defaults; what is given by hand counts in either case.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--full", action="store_true", help="the paper's settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("paper_output") / output)
    for name, default in quick.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default
        )
    options = parser.parse_args()
    if options.full:
        parser.set_defaults(**full)
        options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


def save(options, name, result):
    """Write one part of what was found, and with what, as JSON."""
    made_by = {package: version_of(package) for package in _PACKAGES}
    made_by["device"] = jax.devices()[0].device_kind
    whole = {"seed": options.seed, "made_by": made_by, **result}
    path = options.output / f"{name}.json"
    path.write_text(json.dumps(_shorten(whole)) + "\n")
    print(f"wrote {path}")


def _shorten(value):
    """Keep seven digits of each number."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _shorten(entry) for key, entry in value.items()}
    return [_shorten(entry) for entry in value] if isinstance(value, list) else value


def load(folder, pattern):
    """Read the parts that match a pattern, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def table(heads, rows):
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def batches(tree, size):
    """Split the leading axis of all arrays in a tree."""
    length = len(jax.tree.leaves(tree)[0])
    for start in range(0, length, size):
        yield jax.tree.map(lambda leaf, a=start: leaf[a : a + size], tree)


def vectorise(fit_fn):
    """Compile ``fit_fn`` for a tuple of arrays with a leading axis.

    All of them at once on an accelerator, and one after the other in a loop on a CPU,
    where that is quicker.
    """

    def one(args):
        return fit_fn(*args)

    on_cpu = jax.devices()[0].platform == "cpu"
    return jax.jit(partial(lax.map, one) if on_cpu else jax.vmap(one))


def fit_many(many_fn, seed, data, batch_size, label):
    """Call a vectorised ``fit_fn(rng_key, *data)`` by batches."""
    length = len(jax.tree.leaves(data)[0])
    keys = random.split(random.key(seed), length)
    found = []
    with tqdm(total=length, desc=label) as bar:
        for batch in batches((keys, *data), batch_size):
            found.append(jax.device_get(many_fn(batch)))
            bar.update(len(batch[0]))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *found)


def as_float(*arrays):
    """Return arrays in the precision that JAX works with."""
    return tuple(jnp.asarray(array) for array in arrays)


def ascend(algorithm, state, num_steps, *data):
    """Take steps in one compiled loop; return the last state and what each reported."""
    return lax.scan(lambda s, _: algorithm.update(s, *data), state, length=num_steps)
