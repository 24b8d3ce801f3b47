"""Small models, data and options at random: each runs to finite answers or is refused.

``python -m tests.fuzz --models 100 --seed 1`` prints counts of what happened, as JSON lines.
"""

import argparse
import collections
import json
import math
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints, transforms
from numpyro.infer.reparam import LocScaleReparam

import numpyro_jala
from numpyro_jala import JALAEM
from numpyro_jala.backend import compilation

PACKAGE = str(Path(numpyro_jala.__file__).parent)
CASES_PER_MODEL = 24
ROWS = 6

#: Constraint and starting value of params. The last ones are a user's mistakes.
PARAMS = {
    "real": (constraints.real, 0.3),
    "positive": (constraints.positive, 1.2),
    "unit": (constraints.unit_interval, 0.4),
    "vector": (constraints.real_vector, jnp.array([0.5, -0.5])),
    "ordered": (constraints.ordered_vector, jnp.array([-0.5, 0.5])),
    "simplex": (constraints.simplex, jnp.array([0.3, 0.7])),
    "cholesky": (constraints.lower_cholesky, jnp.eye(2)),
    "interval": (constraints.interval(-2.0, 3.0), 0.5),
    "lazy": (constraints.real, lambda key: random.normal(key)),
    "integer": (constraints.real, 2),
    "outside": (constraints.positive, -1.0),
    "nan": (constraints.real, math.nan),
}
#: Distributions of latents, given a number that depends on the params.
LATENTS = {
    "normal": lambda p: dist.Normal(p, 1.0),
    "student": lambda p: dist.StudentT(4.0, p, 1.0),
    "gamma": lambda p: dist.Gamma(2.0 + jax.nn.softplus(p), 2.0),
    "beta": lambda p: dist.Beta(2.0, 1.0 + jax.nn.softplus(p)),
    "half": lambda p: dist.HalfNormal(0.5 + jax.nn.softplus(p)),
    "lognormal": lambda p: dist.LogNormal(0.1 * p, 0.5),
    "uniform": lambda p: dist.Uniform(0.0, 1.0 + jax.nn.softplus(p)),
    "angle": lambda p: dist.VonMises(0.0, 2.0),
    "dirichlet": lambda p: dist.Dirichlet(jnp.array([1.0, 2.0]) + jax.nn.softplus(p)),
    "vector": lambda p: dist.Normal(p * jnp.ones(2), 1.0).to_event(1),
    "multivariate": lambda p: dist.MultivariateNormal(
        p * jnp.ones(2), jnp.array([[1.0, 0.4], [0.4, 1.0]])
    ),
    "ordered": lambda p: dist.TransformedDistribution(
        dist.Normal(p * jnp.ones(2), 1.0).to_event(1), transforms.OrderedTransform()
    ),
    "coin": lambda p: dist.Bernoulli(logits=p),
    "count": lambda p: dist.Poisson(2.0),
    "improper": lambda p: dist.ImproperUniform(constraints.real, (), ()),
    "delta": lambda p: dist.Delta(p),
    "sphere": lambda p: dist.ProjectedNormal(jnp.array([1.0, 2.0])),
}
#: Distributions of the data, given their mean.
OBSERVED = {
    "normal": lambda m: dist.Normal(m, 0.8),
    "student": lambda m: dist.StudentT(3.0, m, 1.0),
    "poisson": lambda m: dist.Poisson(jax.nn.softplus(m)),
    "coin": lambda m: dist.Bernoulli(logits=m),
    "gamma": lambda m: dist.Gamma(2.0, 0.1 + jax.nn.softplus(-m)),
    "factor": None,
    "none": None,
}


def mostly(common, rare, one_in=20):
    """Draw from the common things, and once in a while from the rare ones."""
    chances = st.integers(1, one_in)
    return chances.flatmap(lambda n: st.sampled_from(rare if n == one_in else common))


class Spec(NamedTuple):
    """What a model looks like."""

    params: tuple[str, ...]
    latents: tuple[str, ...]
    plated: tuple[bool, ...]  # of each latent
    observed: str
    shape: str  # of the likelihood
    handler: str


SPECS = st.builds(
    Spec,
    params=st.lists(mostly(list(PARAMS)[:9], list(PARAMS)[9:]), max_size=3).map(tuple),
    latents=st.lists(
        mostly(list(LATENTS)[:13], list(LATENTS)[13:]), min_size=1, max_size=3
    ).map(tuple),
    plated=st.tuples(*[st.booleans()] * 3),
    observed=mostly(list(OBSERVED)[:6], ["none"]),
    shape=mostly(["rows", "rows", "masked", "imputed"], ["wrong", "column", "scan"]),
    handler=mostly(["plain"], ["scaled", "reparam", "scoped"]),
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "optim": st.sampled_from([None, optax.adam(0.05), optax.sgd(1e-3)]),
        "step_size": st.sampled_from([None, 0.1, 1e-3, 10.0]),
        "preconditioner": mostly(["auto", "dense", "diagonal"], [None]),
        "resampling": st.sampled_from(["systematic", "multinomial", "residual"]),
        "ess_threshold": st.sampled_from([0.0, 0.5, 1.0]),
        "reference": mostly(["prior"], ["laplace"]),
    },
)


#: Data that are not just random.
KINDS = ["constant", "zero", "nan", "inf", "empty", "text", "skewed"]


class Case(NamedTuple):
    """What a model is run on."""

    seed: int
    power: int  # of ten, the size of the data
    kind: str
    num_steps: int
    start: str


CASES = st.builds(
    Case,
    seed=st.integers(0, 2**31 - 1),
    power=mostly([-1, 0, 0, 1], [-6, -3, 3, 6], one_in=10),
    kind=mostly(["random"], KINDS, one_in=10),
    num_steps=st.sampled_from([0, 1, 10, 40]),
    start=mostly(["none"], ["unknown", "outside", "far", "nan"], one_in=10),
)


def total(value):
    """Add all numbers of a value up."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(value))


def build(spec):
    """Return the model of a spec."""

    def inner(x, y, mask):
        params = 0.0
        for i, name in enumerate(spec.params):
            constraint, start = PARAMS[name]
            params = params + total(numpyro.param(f"p{i}", start, constraint=constraint))
        mean = jnp.zeros(())
        for i, name in enumerate(spec.latents):
            with numpyro.plate_stack(f"plate{i}", [2] if spec.plated[i] else []):
                mean = mean + total(numpyro.sample(f"x{i}", LATENTS[name](0.3 * params)))
        mean = mean + 0.1 * x
        if spec.observed == "factor":
            numpyro.factor("y", -0.5 * jnp.sum((mean - jnp.sum(jnp.nan_to_num(y))) ** 2))
        elif spec.observed != "none":
            observe(spec, OBSERVED[spec.observed](mean), mean, y, mask)

    def model(x, y, mask):
        if spec.handler == "scaled":
            return handlers.scale(inner, scale=0.5)(x, y, mask)
        if spec.handler == "reparam":
            config = {"x0": LocScaleReparam(0)}
            return handlers.reparam(inner, config=config)(x, y, mask)
        if spec.handler == "scoped":
            return handlers.scope(inner, "part")(x, y, mask)
        return inner(x, y, mask)

    return model


def observe(spec, fn, mean, y, mask):
    """Observe the data in one of several ways."""
    if spec.shape == "scan":

        def move(level, row):
            level = numpyro.sample("level", dist.Normal(0.5 * level, 1.0))
            numpyro.sample("y", OBSERVED[spec.observed](level + row[0]), obs=row[1])
            return level, None

        scan(move, 0.0, (mean, y))
    elif spec.shape == "masked":
        with handlers.mask(mask=mask):
            numpyro.sample("y", fn, obs=y)
    elif spec.shape == "imputed":
        numpyro.sample("y", fn, obs=y, obs_mask=mask)
    elif spec.shape == "wrong":
        numpyro.sample("y", fn, obs=y[:4])
    elif spec.shape == "column":
        numpyro.sample("y", OBSERVED[spec.observed](mean[:, None]), obs=y)
    else:
        numpyro.sample("y", fn, obs=y)


def data_of(spec, case):
    rng = np.random.default_rng(case.seed)
    size = 0 if case.kind == "empty" else ROWS
    x, y = rng.normal(size=(2, size)) * 10.0**case.power
    if case.kind == "skewed":
        y = np.exp(np.clip(y, -30, 30))
    if case.kind in ("constant", "zero"):
        y = np.full(size, y[0] if case.kind == "constant" else 0.0)
    if spec.observed in ("poisson", "gamma"):
        y = np.abs(y) + 0.1
    if spec.observed == "poisson":
        y = np.round(y)
    if spec.observed == "coin":
        y = (y > 0).astype(float)
    if case.kind in ("nan", "inf"):
        y[2] = {"nan": np.nan, "inf": np.inf}[case.kind]
    y = "six numbers" if case.kind == "text" else y.astype(np.float32)
    return x.astype(np.float32), y, np.arange(size) % 3 != 1


def start_of(spec, case):
    if case.start == "none":
        return None
    if case.start == "unknown":
        return {"nobody": 1.0}
    value = {"outside": -50.0, "far": 1e4, "nan": math.nan}[case.start]
    return {
        f"p{i}": jnp.full(np.shape(PARAMS[name][1]), value)
        for i, name in enumerate(spec.params)
        if name != "lazy"
    }


def attempt(jala, spec, case) -> tuple[str, str]:
    """Run a case; say how it ended, and in which words."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            jala.run(
                random.key(case.seed),
                case.num_steps,
                *data_of(spec, case),
                init_params=start_of(spec, case),
                progress_bar=False,
            )
        numbers: list[Any] = [
            jala.diagnostics()["raw_log_evidence"],
            jala.params,
            jala.get_samples(),
        ]
    except (ValueError, RuntimeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_ours = last.filename.startswith(PACKAGE)
        return ("refused" if is_ours else "crashed"), f"{last.filename}: {error}"
    except Exception as error:
        return "crashed", "".join(traceback.format_exception(error)[-4:])
    finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(numbers))
    return ("ran" if finite else "crashed"), f"log-evidence {jala.log_evidence}"


def fuzz(num_models: int, first_seed: int, stop: bool) -> collections.Counter:
    """Draw models, run each on several cases, and count how they end."""
    counts: collections.Counter = collections.Counter()

    @seed(first_seed)
    @settings(
        max_examples=num_models + 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        spec=SPECS,
        options=OPTIONS,
        cases=st.lists(CASES, min_size=CASES_PER_MODEL, max_size=CASES_PER_MODEL),
    )
    def check(spec, options, cases):
        # Whatever the seed, the first example is the simplest of everything, as many
        # times over as there are cases.
        if len(set(cases)) == 1:
            return
        try:
            jala = JALAEM(build(spec), num_particles=16, num_islands=4, **options)
        except ValueError:
            counts["refused"] += len(cases)
            return
        compilation.make_room()
        for case in cases:
            how, words = attempt(jala, spec, case)
            counts[how] += 1
            if how == "crashed" and not stop:
                print(json.dumps([str(spec), str(options), str(case), words]), flush=True)
            assert not stop or how != "crashed", f"{spec} {options} {case}\n{words}"
        if not stop:
            print(json.dumps(counts), flush=True)

    check()
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given_ = parser.parse_args()
    fuzz(given_.models, given_.seed, stop=False)
