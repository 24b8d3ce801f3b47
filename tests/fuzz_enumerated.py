"""Components of small models with classes that are summed out, at random.

``python -m tests.fuzz_enumerated --models 100 --seed 1`` finds the components of each model
and compares them with the non-zeros of second derivatives, as JSON lines. Components that
are *finer* than those, or potentials that do not add up, are faults.
"""

import argparse
import collections
import json
import warnings
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from scipy.sparse.csgraph import connected_components

from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from numpyro_jala.model.validation import check_sites

#: From the outside to the inside: a site may depend on those of its level and further out.
LEVELS = ["all", "group", "row"]
NUM_POINTS = 3
FAMILIES = {
    "normal": lambda mean: dist.Normal(mean, 0.7),
    "student": lambda mean: dist.StudentT(4.0, mean, 1.0),
    "poisson": lambda mean: dist.Poisson(jax.nn.softplus(mean)),
    "coin": lambda mean: dist.Bernoulli(logits=mean),
}


class Site(NamedTuple):
    """A site, and on which of those before it depends."""

    name: str
    kind: str  # class, latent or data
    level: int
    parents: list[str]
    form: str  # how it depends on them
    num_values: int


class Spec(NamedTuple):
    """What a model looks like."""

    num_groups: int
    num_rows: int
    sites: list[Site]
    masked: list[str]  # kinds of sites whose rows have a mask
    chain: str  # none, group or all


def draw_spec(seed):
    rng = np.random.default_rng(seed)
    sites, chain = [], str(rng.choice(["none", "none", "group", "all"]))
    kinds = ["latent", *rng.permutation(["latent"] * 2 + ["class"] * 2 + ["data"])]
    for i, kind in enumerate([*kinds[: rng.integers(4, 7)], "class", "data"]):
        share = [0.1, 0.5, 0.4] if kind != "latent" else [0.15, 0.6, 0.25]
        level = int(rng.choice(3, p=share)) if i else 1
        if kind == "class" and chain != "none":
            level = 0  # of more classes beside a scan the sum is not checked
        # What is given enters by its form, and no data have children.
        known = [e.name for e in sites if e.level <= level and e.kind != "data"]
        count = min(len(known), rng.integers(1 if kind == "data" else 0, 3))
        parents = [str(each) for each in rng.choice(known, count, replace=False)]
        form = str(rng.choice(list(FAMILIES) if kind == "data" else ["add", "times"]))
        sites.append(
            Site(f"{kind}{i}", str(kind), level, parents, form, int(rng.integers(2, 4)))
        )
    masked = [[], [], ["data"], ["class", "data"]][rng.integers(4)]
    return Spec(int(rng.integers(2, 5)), int(rng.integers(1, 4)), sites, masked, chain)


def mean_of(site, values):
    parts = [0.3 + values[name] for name in site.parents]
    if site.form == "times" and len(parts) > 1:
        parts = [parts[0] * parts[1]]
    return jnp.asarray(sum(parts) if parts else 0.2, jnp.float32)


def draw(site, values, seen):
    """Draw or observe a site."""
    mean = mean_of(site, values)
    if site.kind == "latent":
        return numpyro.sample(site.name, dist.Normal(mean, 1.2))
    if site.kind == "class":
        logits = 0.4 * mean[..., None] * jnp.arange(1.0, 1 + site.num_values)
        return numpyro.sample(site.name, dist.Categorical(logits=logits))
    if site.form in ("poisson", "coin"):
        seen = np.clip(np.round(np.abs(seen)), 0, 1 if site.form == "coin" else 9)
    obs = jnp.asarray(seen, jnp.float32)
    return numpyro.sample(site.name, FAMILIES[site.form](mean), obs=obs)


def build(spec, seed):
    """Return the model of a spec."""
    rng = np.random.default_rng(seed)
    sizes = [1, spec.num_groups, spec.num_rows]
    shapes = [(), (spec.num_groups,), (spec.num_rows, spec.num_groups)]
    seen = {each.name: rng.normal(0.5, 1.0, shapes[each.level]) for each in spec.sites}
    valid = rng.uniform(size=shapes[2]) < 0.7
    series = jnp.asarray(rng.normal(size=(4, spec.num_groups)), jnp.float32)
    turn = jnp.array([[0.7, 0.3], [0.2, 0.8]])

    def within(level, is_masked=False):
        stack = ExitStack()
        for k in range(1, level + 1):
            stack.enter_context(numpyro.plate(LEVELS[k], sizes[k], dim=-k))
        if is_masked and level == 2:
            stack.enter_context(handlers.mask(mask=valid))
        return stack

    def chain(u, level):
        def move(state, y):
            with within(level):
                state = numpyro.sample("state", dist.Categorical(turn[state]))
            with within(1):
                numpyro.sample("seen", dist.Normal(u + state, 0.7), obs=y)
            return state, None

        scan(move, jnp.zeros(shapes[level], int), series)

    def model():
        values = {}
        for site in spec.sites:
            with within(site.level, site.kind in spec.masked):
                values[site.name] = draw(site, values, seen[site.name])
        if spec.chain != "none":
            chain(values[spec.sites[0].name], LEVELS.index(spec.chain))

    return model


def truth(layout, points):
    """Return the components of each latent by second derivatives of both ends."""
    potential = layout.joint([])

    def bend(t, x):
        return jax.hessian(lambda x: potential(layout.init_params, t, x))(x)

    each = jax.vmap(jax.vmap(bend, (None, 0)), (0, None))
    found = np.abs(np.asarray(jax.jit(each)(jnp.array([0.0, 1.0]), points)))
    return connected_components((found > 1e-6).any((0, 1)), directed=False)[1]


def attempt(seed):
    """Compare the components of one model, and say how that ended."""
    spec = draw_spec(seed)
    model = build(spec, seed)
    warnings.simplefilter("ignore")
    trace = run_once(model, random.key(0), (), {})
    try:
        check_sites(trace)
        layout = lay_out(model, trace, (), {}, splits=True)
    except ValueError as error:
        return {"how": "refused", "what": str(error)[:200]}
    points = random.normal(random.key(seed), (NUM_POINTS, layout.dim))
    found, exact = layout.partition.owner, truth(layout, points)
    counts = {"components": len(set(found)), "exact": len(set(exact))}
    pairs = len(set(zip(found, exact, strict=True)))
    if pairs > counts["exact"]:
        return {"how": "finer", **counts}
    gap = sum_gap(layout, points)
    if not gap < 1e-4:
        return {"how": "wrong", "gap": gap, **counts}
    return {"how": "equal" if pairs == counts["components"] else "coarser", **counts}


def sum_gap(layout, points):
    """Return how far the potentials are from adding up, relative to their size."""
    whole, parts = layout.joint([]), layout.potential([])
    gaps = []
    for t in (0.0, 1.0):
        heat = jnp.full(layout.partition.num_components, t)
        each = partial(parts, layout.init_params, heat)
        together = partial(whole, layout.init_params, jnp.asarray(t))
        sums, wanted = (jax.jit(jax.vmap(f))(points) for f in (each, together))
        gaps.append(np.abs(sums.sum(1) - wanted) / (1 + np.abs(wanted)))
    return float(np.max(gaps))


def fuzz(num_models, first_seed):
    """Look at models one after the other, and yield how each ended."""
    for seed in range(first_seed, first_seed + num_models):
        try:
            yield {"seed": seed, **attempt(seed)}
        except Exception as error:
            yield {"seed": seed, "how": "crashed", "what": f"{error!r}"[:300]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    total = collections.Counter()
    for row in fuzz(given.models, given.seed):
        total[row["how"]] += 1
        if row["how"] == "equal":
            total["of several components"] += row["components"] > 1
        else:
            print(json.dumps(row | {"spec": str(draw_spec(row["seed"]))}), flush=True)
    print(json.dumps(total), flush=True)
