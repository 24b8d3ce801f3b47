"""Kill a fit at random times, resume it, and compare with one that was left alone.

``python -m tests.kills --times 20 --seed 1`` prints a JSON line for each time and the count
of those that ended bit by bit as the undisturbed fit did.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints

from numpyro_jala import JALAEM

NUM_GROUPS, NUM_STEPS, EVERY = 20, 1500, 20


def counts(group, y):
    """Counts in groups that differ in their rate."""
    mean = numpyro.param("mean", 0.0)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(mean, spread))
    numpyro.sample("y", dist.Poisson(jnp.exp(u[group])), obs=y)


def fit(folder, name):
    """Fit, or go on with a fit, and store all that it ended with."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(NUM_GROUPS), 4)
    y = rng.poisson(np.exp(0.5 + 0.8 * rng.normal(size=NUM_GROUPS)[group]))
    jala = JALAEM(counts, num_particles=256)
    jala.run(
        random.key(3),
        NUM_STEPS,
        group,
        y,
        progress_bar=False,
        checkpoint=folder / f"{name}.checkpoint",
        checkpoint_every=EVERY,
    )
    state = jala.last_state._replace(rng_key=random.key_data(jala.last_state.rng_key))
    found = [*jax.tree.leaves(state), *jala.params.values(), jala.log_evidence]
    np.savez(folder / f"{name}.npz", *map(np.asarray, found))


def start(folder, name):
    """Start a process that fits."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, "-m", "tests.kills", "--fit", str(folder), name]
    return subprocess.Popen(command, env=environment)


def same(folder, one, other):
    """Tell whether two fits ended with the same bits."""
    with np.load(folder / f"{one}.npz") as a, np.load(folder / f"{other}.npz") as b:
        assert sorted(a) == sorted(b)
        return all(a[key].tobytes() == b[key].tobytes() for key in a)


def main(times, seed):
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as place:
        folder, alike = Path(place), 0
        for name in ("compiled", "alone"):
            begin = time.perf_counter()
            assert start(folder, name).wait() == 0
            seconds = time.perf_counter() - begin
        for i in range(times):
            name, wait = f"killed_{i}", rng.uniform(0.0, seconds)
            child = start(folder, name)
            time.sleep(wait)
            was_running = child.poll() is None
            child.kill()
            child.wait()
            has_checkpoint = (folder / f"{name}.checkpoint").exists()
            assert start(folder, name).wait() == 0
            is_same = same(folder, "alone", name)
            alike += is_same
            record = {"after_s": round(wait, 2), "was_running": was_running}
            record |= {"had_checkpoint": has_checkpoint, "is_same": is_same}
            print(json.dumps(record), flush=True)
        print(
            json.dumps({"times": times, "identical": alike, "whole_s": round(seconds, 1)})
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", nargs=2, help="a folder, and a name: one fit alone")
    options = parser.parse_args()
    if options.fit:
        fit(Path(options.fit[0]), options.fit[1])
    else:
        main(options.times, options.seed)
