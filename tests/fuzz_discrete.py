"""Small models of discrete latents, scans, masks and booleans at random.

``python -m tests.fuzz_discrete --models 300 --seed 1`` makes each density, compares it with
the sum by hand, and counts how that ended, as JSON lines. Models run in child processes,
so that a fault of the compiler is counted and not the end; with ``--runs`` each model is
also fitted.
"""

import argparse
import collections
import itertools
import json
import os
import subprocess
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density

import numpyro_jala
from numpyro_jala import JALAEM
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from numpyro_jala.model.validation import check_sites

PACKAGE = str(Path(numpyro_jala.__file__).parent)
#: Models of one child process: to start one takes seconds.
AT_ONCE = 10


KINDS = ("latent", "data")


class Spec(NamedTuple):
    """What a model looks like."""

    num_animals: int
    num_steps: int
    num_values: int  # of a discrete latent
    mask: str  # none, carried, seen, never, alive, outer
    masks: str  # which sites: both, latent, data
    update: str  # how the boolean goes on
    carries: str  # what else the carry holds
    data: str
    begins: str  # where the chain begins
    has_param: bool


CHOICES = {
    "num_animals": [0, 1, 2],
    "num_steps": [2, 3],
    "num_values": [2, 3],
    "mask": ["none", "carried", "carried", "seen", "never", "alive", "outer"],
    "masks": ["both", "both", "latent", "data"],
    "update": ["or", "and", "not", "xor", "where", "compare"],
    "carries": ["state", "boolean", "level", "nothing"],
    "data": ["coin", "normal"],
    "begins": ["known", "drawn"],
    "has_param": [False, True],
}


def draw_spec(seed):
    rng = np.random.default_rng(seed)
    return Spec(**{name: each[rng.integers(len(each))] for name, each in CHOICES.items()})


def advance(update, seen, y):
    """Return the boolean of the next step."""
    now = y > 0.5
    return {
        "or": seen | now,
        "and": seen & ~now,
        "not": ~seen,
        "xor": seen ^ now,
        "where": jnp.where(seen, now, True),
        "compare": (1.0 * seen + y) > 0.9,
    }[update]


def build(spec):
    """Return the model of a spec, a function of its data."""
    shape = (spec.num_animals,) if spec.num_animals else ()
    turn = jnp.arange(1.0, 1 + spec.num_values**2).reshape(spec.num_values, -1)

    def observe(state, level, y):
        if spec.data == "normal":
            numpyro.sample("y", dist.Normal(state + level, 0.7), obs=y)
        else:
            numpyro.sample("y", dist.Bernoulli(logits=state - level), obs=y)

    def model(ys):
        shift = numpyro.param("shift", 0.2) if spec.has_param else 0.2
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))

        def draw(state, seen):
            weight = jax.nn.softplus(slope + shift) * turn[state]
            weight = jnp.where(jnp.asarray(seen)[..., None], weight, 1.0 + weight)
            return dist.Categorical(weight / weight.sum(-1, keepdims=True))

        def move(carry, y):
            seen, state, more = carry
            mask = {
                "none": True,
                "carried": seen,
                "seen": y > 0.5,
                "never": False,
                "alive": more if spec.carries == "boolean" else seen,
                "outer": jnp.ones(shape, bool),
            }[spec.mask]
            kept = {name: mask if spec.masks in (name, "both") else True for name in KINDS}
            with numpyro.plate_stack("animals", list(shape)):
                with handlers.mask(mask=kept["latent"]):
                    state = numpyro.sample("state", draw(state, seen))
                with handlers.mask(mask=kept["data"]):
                    observe(state, slope * more if spec.carries == "level" else slope, y)
            more = {"boolean": state > 0, "level": 0.5 * more + y}.get(spec.carries, more)
            return (advance(spec.update, seen, y), state, more), None

        first = jnp.zeros(shape, int)
        if spec.begins == "drawn":
            with numpyro.plate_stack("start", list(shape)):
                first = numpyro.sample("first", dist.Categorical(turn[0] / turn[0].sum()))
        more = jnp.ones(shape, bool) if spec.carries == "boolean" else jnp.zeros(shape)
        scan(move, (jnp.zeros(shape, bool), first, more), ys)

    return model


def data_of(spec, seed):
    rng = np.random.default_rng(seed)
    shape = (spec.num_animals,) if spec.num_animals else ()
    ys = rng.normal(0.5, 0.5, (spec.num_steps, *shape))
    return (ys > 0.5 if spec.data == "coin" else ys).astype(np.float32)


def sum_by_hand(model, trace, known):
    """Return the log-density at known latents, discrete ones summed out one by one."""
    sites = {n: site for n, site in trace.items() if n in ("first", "state")}
    sizes = [int(np.size(site["value"])) for site in sites.values()]
    ends = np.cumsum(sizes)[:-1]
    num_values = len(sites["state"]["fn"].enumerate_support(expand=False))
    rows = jnp.array(list(itertools.product(range(num_values), repeat=sum(sizes))))

    def at(row):
        parts = zip(sites, jnp.split(row, ends), strict=True)
        drawn = {n: part.reshape(np.shape(trace[n]["value"])) for n, part in parts}
        return log_density(model, (), {}, known | drawn)[0]

    return float(logsumexp(jax.jit(jax.vmap(at))(rows)))


def density_error(model):
    """Return how far the compiled density is from the sum by hand."""
    trace = run_once(model, random.key(0), (), {})
    check_sites(trace)
    layout = lay_out(model, trace, (), {})
    potential, at = layout.joint([]), jnp.array([[0.3], [-0.4]])
    one = jnp.ones(())
    fn = jax.vmap(jax.value_and_grad(lambda x: potential(layout.init_params, one, x)))
    found, slope = jax.jit(fn)(at)
    exact = [sum_by_hand(model, trace, {"slope": x[0]}) for x in at]
    return float(np.abs(found + np.array(exact)).max() + 0 * slope.sum())


def exact_evidence(model):
    """Return the log-evidence at the first params by quadrature over the one latent."""
    layout = lay_out(model, run_once(model, random.key(0), (), {}), (), {})
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    at = jnp.asarray(nodes, jnp.float32)[:, None]
    one, potential = jnp.ones(()), layout.joint([])
    logs = -jax.jit(jax.vmap(lambda x: potential(layout.init_params, one, x)))(at)
    return float(logsumexp(logs + 0.5 * nodes**2 + np.log(weights)))


def attempt(seed, runs):
    """Look at a model, and fit it if asked to; say how that ended."""
    spec = draw_spec(seed)
    model = partial(build(spec), data_of(spec, seed))
    warnings.simplefilter("ignore")
    try:
        error = density_error(model)
        if not error < 1e-3:
            return "wrong", error
        if runs:
            jala = JALAEM(model, num_particles=32, num_islands=4)
            jala.run(random.key(seed), 0, progress_bar=False)
            gap = jala.log_evidence - exact_evidence(model)
            if not abs(gap) < 5 * jala.log_evidence_se + 0.05:
                return "wrong", gap
    except (ValueError, RuntimeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = last.filename.startswith(PACKAGE)
        return ("refused" if is_ours else "crashed"), str(error)[:200]
    except Exception as error:
        return "crashed", f"{type(error).__name__}: {error}"[:300]
    return "right", error


def fuzz(num_models, first_seed, runs=False):
    """Look at models in child processes, and yield how each ended."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for start in range(first_seed, first_seed + num_models, AT_ONCE):
        stop = min(start + AT_ONCE, first_seed + num_models)
        while start < stop:
            command = [sys.executable, "-m", "tests.fuzz_discrete", "--child"]
            command += [str(start), str(stop), str(int(runs))]
            child = subprocess.run(command, env=environment, capture_output=True, text=True)
            rows = [json.loads(line) for line in child.stdout.splitlines() if line]
            yield from rows
            start += len(rows)
            if start < stop:  # the next one ended the process
                yield {"seed": start, "how": "fault", "what": child.stderr[-300:]}
                start += 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--child", type=int, nargs=3)
    given = parser.parse_args()
    if given.child:
        for seed in range(*given.child[:2]):
            how, what = attempt(seed, given.child[2])
            print(json.dumps({"seed": seed, "how": how, "what": what}), flush=True)
    else:
        total = collections.Counter()
        for row in fuzz(given.models, given.seed, given.runs):
            total[row["how"]] += 1
            if row["how"] not in ("right", "refused"):
                print(json.dumps(row | {"spec": str(draw_spec(row["seed"]))}), flush=True)
        print(json.dumps(total), flush=True)
