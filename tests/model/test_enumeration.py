"""Discrete latents beside and within a scan: summed out as by hand, or refused."""

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import log_density
from scipy.stats import multivariate_normal, norm

from numpyro_jala import JALAEM
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from tests import fuzz_discrete

TURN = jnp.array([[0.7, 0.3], [0.2, 0.8]])
SEEN = np.array([0.3, 1.0, 2.0, -1.0], np.float32)


def walk(y):
    """A discrete latent beside a scan of others."""
    z = numpyro.sample("z", dist.Bernoulli(0.4))

    def move(level, seen):
        level = numpyro.sample("level", dist.Normal(0.5 * level, 1.0))
        numpyro.sample("y", dist.Normal(level + 2.0 * z, 0.5), obs=seen)
        return level, None

    scan(move, 0.0, y)
    numpyro.sample("e", dist.Normal(2.0 * z, 1.0), obs=0.7)


def chain(y, reaches, num_others=1):
    """One with which a chain begins, and which may reach into its body; and others."""
    numpyro.sample("w", dist.Normal(0.0, 1.0))
    z = numpyro.sample("z", dist.Bernoulli(0.4))
    with numpyro.plate("apart", num_others):
        numpyro.sample("others", dist.Bernoulli(0.3))

    def move(state, seen):
        state = numpyro.sample("state", dist.Categorical(TURN[state]))
        mean = state + 2.0 * z if reaches else 1.0 * state
        numpyro.sample("y", dist.Normal(mean, 0.5), obs=seen)
        return state, None

    scan(move, z, y)


def staying(y):
    """One that is drawn in the body, as the refusal of the above advises."""
    numpyro.sample("w", dist.Normal(0.0, 1.0))
    stay = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.4]])

    def move(carry, seen):
        z, state = carry
        z = numpyro.sample("z", dist.Categorical(stay[z]))
        state = numpyro.sample("state", dist.Categorical(TURN[state]))
        numpyro.sample("y", dist.Normal(state + 2.0 * z, 0.5), obs=seen)
        return (z, state), None

    scan(move, (2, 0), y)


# With three steps the scan has as many after its first as the latent has values.
@pytest.mark.parametrize("num_steps", [3, 4])
@pytest.mark.parametrize("model", [walk, partial(chain, reaches=False), staying])
def test_the_sum_is_that_by_hand(model, num_steps):
    model = partial(model, SEEN[:num_steps])
    trace = run_once(model, random.key(0), (), {})
    layout = lay_out(model, trace, (), {})
    known = layout.unravel_latents(layout.anchor)
    shapes = [np.shape(trace[name]["value"]) for name in layout.discrete]
    values = [itertools.product((0, 1), repeat=int(np.prod(shape))) for shape in shapes]
    log_joint = jax.jit(lambda drawn: log_density(model, (), {}, known | drawn)[0])
    logs = []
    for each in itertools.product(*values):
        drawn = {
            name: jnp.reshape(jnp.array(value), shape)
            for name, value, shape in zip(layout.discrete, each, shapes, strict=True)
        }
        logs.append(log_joint(drawn))
    found = -jax.jit(layout.joint([]))(layout.init_params, jnp.ones(()), layout.anchor)
    np.testing.assert_allclose(found, logsumexp(jnp.array(logs)), rtol=1e-5)


def test_a_discrete_latent_beside_a_scan_is_summed_out():
    lag = np.subtract.outer(np.arange(4), np.arange(4))
    root = np.where(lag >= 0, 0.5 ** np.maximum(lag, 0), 0.0)
    covariance = root @ root.T + 0.25 * np.eye(4)
    parts = [
        np.log(share)
        + multivariate_normal.logpdf(SEEN, np.full(4, mean), covariance)
        + norm.logpdf(0.7, mean, 1.0)
        for share, mean in ((0.6, 0.0), (0.4, 2.0))
    ]
    jala = JALAEM(walk, num_particles=256)
    jala.run(random.key(1), 0, SEEN, progress_bar=False)
    assert jala.log_evidence_se < 0.1
    error = jala.log_evidence - np.logaddexp(*parts)
    assert abs(error) < 4 * jala.log_evidence_se + 0.005
    assert set(jala.get_samples()) == {"level"}
    with pytest.raises(ValueError, match="scan.*'z'.*cannot be drawn"):
        jala.predict(random.key(0))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (partial(chain, SEEN, True), r"\['z', .*\['state'\], and its body depends on them"),
        (
            partial(chain, SEEN, False, 7),
            r"\['z', 'others'\].*more than 64 values together",
        ),
    ],
)
def test_a_sum_that_is_not_right_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        JALAEM(model).run(random.key(0), 0)


CAPTURED = np.array([[0, 1, 1, 1], [0, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]], np.int32)


def recapture(h, hides="both"):
    """Animals that are seen or not, from the time when they were first seen."""
    survival = numpyro.sample("survival", dist.Uniform())
    caught = numpyro.sample("caught", dist.Uniform())

    def move(carry, y):
        seen, alive = carry
        hidden = alive == 1 if hides == "latent" else seen
        with numpyro.plate("animals", len(h), dim=-1), numpyro.handlers.mask(mask=hidden):
            p = dist.util.clamp_probs(seen * survival * alive + (1 - seen))
            alive = numpyro.sample("alive", dist.Bernoulli(p))
            p = dist.util.clamp_probs(caught * alive)
            numpyro.sample("y", dist.Bernoulli(p), obs=y)
        return (seen | y.astype(bool), alive), None

    start = h[:, 0].astype(bool), jnp.ones(len(h), jnp.int32)
    scan(move, start, jnp.swapaxes(h[:, 1:], 0, 1))


def recapture_evidence(h, num_points=100):
    """Sum and integrate by hand; what is masked counts one for each value."""
    grid = (np.arange(num_points) + 0.5) / num_points
    survival, caught = np.meshgrid(grid, grid)
    product = np.ones_like(survival)
    for history in h:
        total = 0.0
        for path in itertools.product((0, 1), repeat=len(history) - 1):
            term, alive, seen = 1.0, 1, bool(history[0])
            for now, y in zip(path, history[1:], strict=True):
                if seen:
                    lives, shows = survival * alive, caught * now
                    term = term * (lives if now else 1 - lives)
                    term = term * (shows if y else 1 - shows)
                alive, seen = now, seen or bool(y)
            total = total + term
        product = product * total
    return np.log(product.mean())


FITTED = """
import json, warnings
from jax import random
from numpyro_jala import JALAEM
from tests.model.test_enumeration import CAPTURED, recapture
jala = JALAEM(recapture, num_particles=256)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    jala.run(random.key(0), 0, CAPTURED, progress_bar=False)
said = [str(each.message) for each in caught]
print(json.dumps([jala.log_evidence, jala.log_evidence_se, jala.diagnostics(), said]))
"""


def test_a_boolean_in_a_carry_and_in_a_mask_is_no_fault():
    # In a process of its own: a fault would end this one.
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", FITTED]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2_000:]
    found, error, figures, said = json.loads(done.stdout.decode().splitlines()[-1])
    exact = recapture_evidence(CAPTURED)
    assert abs(found - exact) < 4 * error + 0.01 < 0.2
    spread = figures["recursive_log_evidence_sd"] / np.sqrt(8)
    assert abs(figures["recursive_log_evidence"] - exact) < 4 * spread < 0.6
    assert len(said) == 1 and "'alive' 4 draws are masked" in said[0]
    assert f"the prior sums to exp({4 * np.log(2):.2f})" in said[0]


def test_a_mask_that_depends_on_a_latent_is_refused():
    with pytest.raises(ValueError, match="'alive' has a mask that depends on latents"):
        JALAEM(recapture).run(random.key(0), 0, CAPTURED, "latent", progress_bar=False)


SHARED = {"enumerate": "parallel"}


def sharing(y):
    """Sites in a scan and outside of it with one ``infer`` dictionary."""
    w = numpyro.sample("w", dist.Normal(), infer=SHARED)

    def move(state, seen):
        fn = dist.Bernoulli(logits=w + state - 1.0)
        state = numpyro.sample("state", fn, infer=SHARED)
        numpyro.sample("y", dist.Normal(state, 0.5), obs=seen, infer=SHARED)
        return state, None

    scan(move, 0, y)
    apart = numpyro.sample("apart", dist.Bernoulli(0.3), infer=SHARED)
    numpyro.sample("e", dist.Normal(w + apart, 1.0), obs=0.4, infer=SHARED)


def test_sites_may_share_one_infer_dictionary():
    fixed, arrays, _ = JALAEM(sharing)._inspect(random.key(0), (SEEN,), {})
    params, w = fixed.layout.init_params, 0.3
    found = fixed.layout.joint(arrays)(params, jnp.ones(()), jnp.array([w]))
    chains = 0.0
    for states in itertools.product([0, 1], repeat=SEEN.size):
        before = np.array([0, *states[:-1]])
        chance = 1 / (1 + np.exp(1.0 - w - before))
        drawn = np.prod(np.where(states, chance, 1 - chance))
        chains += drawn * np.prod(norm(states, 0.5).pdf(SEEN))
    apart = 0.7 * norm(w, 1).pdf(0.4) + 0.3 * norm(w + 1, 1).pdf(0.4)
    by_hand = norm.logpdf(w) + np.log(chains * apart)
    np.testing.assert_allclose(-found, by_hand, rtol=1e-5)
    assert SHARED == {"enumerate": "parallel"}


def test_discrete_latents_masks_and_booleans_at_random_are_no_fault():
    ends = [row["how"] for row in fuzz_discrete.fuzz(num_models=4, first_seed=3)]
    assert set(ends) <= {"right", "refused"} and "right" in ends


def test_a_latent_within_a_scan_over_discrete_ones_gets_a_sentence():
    """NumPyro's own samplers end in an AssertionError without a text on this model."""

    def model(y):
        def step(state, seen):
            chance = numpyro.sample("chance", dist.Uniform())
            with numpyro.plate("animal", 3, dim=-1):
                infer = {"enumerate": "parallel"}
                state = numpyro.sample("state", dist.Bernoulli(chance), infer=infer)
                numpyro.sample("y", dist.Bernoulli(0.2 + 0.5 * state), obs=seen)
            return state, None

        scan(step, jnp.ones(3, int), y)

    y = np.array([[1, 0, 1], [0, 0, 1]])
    with pytest.raises(ValueError, match="drawn within a scan are best drawn before"):
        JALAEM(model).run(random.key(0), 0, y, progress_bar=False)
