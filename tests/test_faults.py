"""Data and starts that break lesser software."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import multivariate_normal, norm

from numpyro_jala import JALAEM
from numpyro_jala.engine import sampler
from numpyro_jala.engine.geometry import loo_factor
from numpyro_jala.engine.partition import joint
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import evidence, programs
from numpyro_jala.results import diagnostics, log_evidence
from tests.tools import (
    SCHOOLS,
    assert_mean,
    normal_means,
    normal_means_log_likelihood,
    regression,
    regression_data,
    regression_log_evidence,
)

GROUP = np.repeat(np.arange(8), 5)


def mixed(x, y):
    b = numpyro.param("b", jnp.zeros(2))
    tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
    sigma = numpyro.param("sigma", 1.0, constraint=constraints.positive)
    with numpyro.plate("group", 8):
        u = numpyro.sample("u", dist.Normal(0, tau))
    numpyro.sample("y", dist.Normal(b[0] + b[1] * x + u[GROUP], sigma), obs=y)


def exact(x, y, b, tau, sigma):
    same = GROUP[:, None] == GROUP
    covariance = tau**2 * same + sigma**2 * np.eye(40)
    return multivariate_normal(b[0] + b[1] * x, covariance).logpdf(y)


def maximum(x, y):
    """Maximise over units in which the data are of size one."""
    design = np.stack([np.ones(40), x], 1)
    first = np.linalg.lstsq(design, y, rcond=None)[0]
    size = np.array([y.std(), y.std() / max(x.std(), 1e-9)])

    def short(z):
        return -exact(x, y, first + size * z[:2], *(y.std() * np.exp(z[2:])))

    options = {"maxiter": 4000, "xatol": 1e-6, "fatol": 1e-9}
    starts = (np.zeros(4), np.array([0, 0, -3.0, 0]))
    return max(
        -minimize(short, z, method="Nelder-Mead", options=options).fun for z in starts
    )


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=40)
    y = 1 + 0.5 * x + rng.normal(size=8)[GROUP] + 0.7 * rng.normal(size=40)
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="module")
def jala():
    return JALAEM(mixed, num_particles=256)


X, Y = data()
CASES = {
    "small data": (X, Y * 1e-6, {}),
    "large covariate": (X * 1e6, Y, {}),
    "large data": (X, Y * 1e6, {"tau": 1e6}),
    "far from zero": (X, Y + 1e4, {}),
    "duplicated rows": (np.repeat(X[::2], 2), np.repeat(Y[::2], 2), {}),
    "far start": (X, Y, {"b": np.array([500.0, -300.0]), "tau": 1e3, "sigma": 1e-3}),
    "farther start": (X, Y, {"b": np.array([1e6, 0.0])}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_maximum_is_found(jala, name):
    x, y, start = CASES[name]
    x, y = x.astype(np.float32), y.astype(np.float32)
    with warnings.catch_warnings():
        if name in ("far from zero", "farther start"):
            # The path from there is rough, and most runs warn, rightly, of its evidence.
            warnings.filterwarnings("ignore", "The log-evidence along the path")
        jala.run(random.key(2), 200, x, y, init_params=start, progress_bar=False)
    params = {key: np.asarray(value, float) for key, value in jala.params.items()}
    wide = np.asarray(x, float), np.asarray(y, float)
    found = exact(*wide, **params)
    assert maximum(*wide) - found < 0.01
    assert abs(jala.log_evidence - found) < 4 * jala.log_evidence_se + 0.005 < 0.1


def test_a_constant_column_is_said_to_be_undetermined(jala):
    x = np.ones(40, np.float32)
    with pytest.warns(UserWarning, match=r"hardly determine b\[\d\]"):
        jala.run(random.key(2), 150, x, Y, progress_bar=False)
    params = {key: np.asarray(value, float) for key, value in jala.params.items()}
    assert maximum(x.astype(float), Y.astype(float)) - exact(x, Y, **params) < 0.01


def test_a_spread_that_starts_at_nothing_is_said_to_be_open(jala):
    start = {"tau": 1e-3, "sigma": 1e3}
    with pytest.warns(UserWarning, match="hardly determine tau"):
        jala.run(random.key(2), 200, X, Y, init_params=start, progress_bar=False)


def test_a_potential_of_a_million_keeps_its_digits():
    """Single precision has steps of 1/16 there."""

    def model(y, constant):
        normal_means(y)
        numpyro.factor("constant", constant)

    jala = JALAEM(model, num_particles=256)
    constant = np.float32(-1e6)
    for scale in (1.0, 1.02, 1.04, 1.06):
        y = np.float32(scale) * SCHOOLS
        jala.run(random.key(0), 60, y, constant, progress_bar=False)
        best = normal_means_log_likelihood(jala.params, y) + float(constant)
        assert abs(jala.log_evidence - best) < 4 * jala.log_evidence_se < 0.01


def test_one_observation_and_a_likelihood_that_underflows():
    def model(y):
        mu = numpyro.param("mu", 0.0)
        x = numpyro.sample("x", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(x, 1e-2), obs=y)

    jala = JALAEM(model, num_particles=128)
    # At the start the density of this is exp(-10⁶).
    jala.run(random.key(0), 60, np.float32(1500.0), progress_bar=False)
    best = norm(1500.0, np.sqrt(1 + 1e-4)).logpdf(1500.0)
    np.testing.assert_allclose(jala.params["mu"], 1500.0, atol=0.02)
    assert abs(jala.log_evidence - best) < 0.01


@pytest.mark.parametrize("where", ["start", "far"])
def test_regions_without_a_finite_density_have_none(where):
    """Particles that come to NaN die, and the mass is that of the rest."""
    edge = 0.0 if where == "start" else 2.0

    def model(y):
        x = numpyro.sample("x", dist.Normal())
        mean = jnp.where(x < edge, x, jnp.nan)
        numpyro.sample("y", dist.Normal(mean, 1.0, validate_args=False), obs=y)

    jala = JALAEM(model, num_particles=512)
    with warnings.catch_warnings():
        # An edge within the posterior is not what Gaussians cover well.
        warnings.simplefilter("ignore")
        jala.run(random.key(0), 0, np.float32(0.3), progress_bar=False)
    whole = norm(0, np.sqrt(2)).logpdf(0.3)
    share = norm(0.15, np.sqrt(0.5)).logcdf(edge)
    error = jala.log_evidence - whole - share
    assert abs(error) < 4 * jala.log_evidence_se < 0.2


class Flawed(dist.Normal):
    """Some of its draws are NaN, as those of a Beta with small concentrations may be."""

    def sample(self, key, sample_shape=()):
        draw = super().sample(key, sample_shape)
        return jnp.where(
            random.uniform(random.fold_in(key, 1), draw.shape) < 0.01, jnp.nan, draw
        )


def test_draws_that_are_nan_do_not_spoil_the_others():
    def model(y):
        x = numpyro.sample("x", Flawed(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x, 0.5), obs=y)

    jala = JALAEM(model)
    jala.run(random.key(0), 0, np.float32(0.3), progress_bar=False)
    exact = norm(0, np.sqrt(1.25)).logpdf(0.3)
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se + 0.01 < 0.1


def test_a_site_without_a_finite_density_near_the_particles_is_named(monkeypatch):
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        mean = jnp.where(x < 1.0, x, jnp.nan)
        numpyro.sample("y", dist.Normal(mean, 1.0, validate_args=False), obs=y)

    run_steps = programs.run_steps

    def deadly(fixed, data, state, *rest):
        new, infos, count = run_steps(fixed, data, state, *rest)
        dead = jnp.full_like(new.cloud.log_weight, -jnp.inf)
        return new._replace(cloud=new.cloud._replace(log_weight=dead)), infos, count

    deadly.lower = run_steps.lower
    monkeypatch.setattr(programs, "run_steps", deadly)
    with pytest.raises(RuntimeError) as caught:
        JALAEM(model).run(random.key(0), 0, np.float32(0.3), progress_bar=False)
    words = (
        r"have none: site 'y' has log-density nan at its value 0.3\d*, where x = (\S+)\."
    )
    found = re.search(words, str(caught.value))
    assert found and float(found[1]) >= 1.0
    assert "Check the model there" in str(caught.value)
    assert "param" not in str(caught.value)


def test_a_step_size_that_kills_the_particles_is_named():
    jala = JALAEM(normal_means, num_particles=32, num_islands=4, step_size=1e37)
    with pytest.raises(RuntimeError, match=r"step_size=1e\+37 may be too large"):
        jala.run(random.key(0), 40, SCHOOLS, progress_bar=False)
    assert jala.last_state is not None
    assert np.isfinite(jala.get_params(jala.last_state)["mu"])


def test_without_a_bridge_after_steps_the_evidence_of_the_path_is_raw(means):
    run = means._run
    run.finished = run.result._replace(bridge=evidence.unknown(8))
    found = means.diagnostics()
    assert found["raw_log_evidence"] == found["recursive_log_evidence"]
    assert np.isnan([means.log_evidence, means.log_evidence_se]).all()
    said = " ".join(diagnostics.warning_messages(run))
    assert "NaN, since no Gaussian" in said and "could not be estimated afresh" in said
    assert "with num_steps=0" in said


def test_the_error_of_the_evidence_along_the_path_is_calibrated():
    x, y = regression_data()
    exact, jala = regression_log_evidence(x, y), JALAEM(regression, num_particles=256)
    scores = []
    for seed in range(40):
        jala.run(random.key(seed), 0, x, y, progress_bar=False)
        run = jala._run
        run.finished = run.result._replace(bridge=evidence.unknown(8))
        scores.append((jala.log_evidence - exact) / jala.log_evidence_se)
        island = np.asarray(run.result.recursive)
        np.testing.assert_array_equal(log_evidence.island_evidence(run), island)
    assert 0.75 < np.std(scores, ddof=1) < 1.35
    assert abs(np.mean(scores)) < 4 / np.sqrt(40)


def test_a_rate_that_is_linear_in_the_gradient_does_not_carry_particles_too_far():
    """Of a count of zero a rise of the temperature seems to cost nothing at the prior."""

    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(0.7, 0.3))
        numpyro.sample("y", dist.Poisson(rate).expand([3]), obs=y)

    jala, y = JALAEM(model), np.zeros(3, np.float32)
    ratios = []
    for seed in range(30):
        jala.run(random.key(seed), 0, y, progress_bar=False)
        path = jala.diagnostics()["recursive_log_evidence"]
        ratios.append(np.exp(path - 0.7 * np.log(0.3 / 3.3)))
    assert_mean(ratios, 1.0, resolution=0.25)


def test_the_evidence_does_not_drift_in_a_long_run(compiled_means):
    compiled_means.run(random.key(3), 5_000, SCHOOLS, progress_bar=False)
    best = normal_means_log_likelihood(compiled_means.params)
    error = compiled_means.log_evidence_se
    assert abs(compiled_means.log_evidence - best) < 4 * error < 0.05
    found = compiled_means.diagnostics()["recursive_log_evidence"]
    assert abs(found - best) < 5


DOUBLE = """
import numpy as np
import numpyro
from jax import random
from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means, normal_means_log_likelihood

# Without params, and with a param and latents of single precision.
def single(y):
    mu = numpyro.param("mu", np.float32(1.0)) if ESTIMATES else 1.0
    x = numpyro.sample("x", numpyro.distributions.Normal(np.float32(0.0), np.float32(1.0)))
    numpyro.sample("y", numpyro.distributions.Normal(mu + x, np.float32(2.0)), obs=y)

for ESTIMATES in (False, True):
    jala = JALAEM(single, num_particles=64)
    jala.run(random.key(0), 20, np.float32(0.5), progress_bar=False)
    gap = 0.5 - (jala.params["mu"] if ESTIMATES else 1.0)
    exact = -0.5 * np.log(2 * np.pi * 5) - gap**2 / 10
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se + 1e-6

jala = JALAEM(normal_means, num_particles=256)
for data in (SCHOOLS, SCHOOLS.astype(float)):
    jala.run(random.key(0), 60, data, progress_bar=False)
    best = normal_means_log_likelihood(jala.params)
    assert jala.get_samples()["x"].dtype == np.float64
    assert abs(jala.log_evidence - best) < 4 * jala.log_evidence_se < 0.1
    assert abs(jala.params["mu"] - SCHOOLS.mean()) < 0.01
"""


def test_double_precision():
    command = [sys.executable, "-W", "error::UserWarning", "-c", DOUBLE]
    root = Path(__file__).parents[1]
    environment = {"JAX_ENABLE_X64": "1", "PYTHONPATH": str(root)}
    subprocess.run(command, cwd=root, env={**os.environ, **environment}, check=True)


def test_params_near_the_maximum_are_not_led_astray_by_low_temperatures():
    # Flattened, the likelihood of a smooth function prefers a constant one, and at the
    # posterior no gradient leads back from there.
    x = np.linspace(0, 6, 15)
    y = np.sin(1.5 * x) + 0.3 * np.random.default_rng(2).normal(size=15)

    def model(squares, y):
        scale, length, noise = (
            numpyro.param(name, value, constraint=constraints.positive)
            for name, value in (("scale", 1.5), ("length", 1.5), ("noise", 0.5))
        )
        kernel = scale**2 * jnp.exp(-squares / (2 * length**2))
        root = jnp.linalg.cholesky(kernel + 1e-4 * jnp.eye(15))
        z = numpyro.sample("z", dist.Normal(jnp.zeros(15), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(root @ z, noise), obs=y)

    data = ((x[:, None] - x) ** 2).astype(np.float32), y.astype(np.float32)
    jala = JALAEM(model, num_particles=128)
    for seed in range(8):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The parameters have not converged")
            jala.run(random.key(seed), 1, *data, progress_bar=False)
        assert jala.params["length"] < 5, seed


def test_an_island_survives_when_the_weight_of_the_others_is_on_one_particle():
    jala = JALAEM(normal_means, num_particles=10, num_islands=2, components="joint")
    state = jala.init(random.key(0), SCHOOLS)
    heavy = state.cloud.log_weight.at[0, :, 1:].add(-200.0)
    state = state._replace(
        cloud=state.cloud._replace(log_weight=heavy), num_moves=jnp.zeros((), int)
    )
    new, info = jax.jit(jala.update)(state, SCHOOLS)
    assert info.ess_lowest == pytest.approx(0.2) and info.died == 0
    # What the first island sees is worth something, and what the second sees is not.
    (after,), (before,) = new.factor.blocks, state.factor.blocks
    assert not np.array_equal(after[0], before[0])
    assert np.array_equal(after[1], before[1])


@pytest.mark.parametrize(
    ("num_particles", "num_islands", "temperature", "share"),
    [(10, 2, 1.0, 0.2), (20, 5, 1.0, 0.64), (60, 2, 1.0, 1.0), (10, 2, 0.9, 1.0)],
)
def test_the_shape_of_a_handful_of_particles_is_averaged_over_moves(
    num_particles, num_islands, temperature, share
):
    kwargs = {"num_particles": num_particles, "num_islands": num_islands}
    jala = JALAEM(normal_means, ess_threshold=0.0, components="joint", **kwargs)
    state = jala.init(random.key(0), SCHOOLS)
    target = state.target._replace(temperature=jnp.full((num_islands, 1), temperature))
    last = jax.tree.map(lambda block: 2 * block, state.factor)
    state = state._replace(num_moves=jnp.zeros((), int), factor=last, target=target)
    new, _ = jax.jit(jala.update)(state, SCHOOLS)
    cloud, weight = new.cloud, normalise(new.cloud.log_weight)
    fresh = loo_factor(weight, cloud.position, cloud.gradient, joint(6), most_dense=6)
    (found,), (first,), (then,) = new.factor.blocks, last.blocks, fresh.blocks
    assert found.shape == (num_islands, 1, 6, 6)
    expected = first + share * (then - first)
    assert found == pytest.approx(np.asarray(expected), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("num_particles", [10, 60])
def test_a_shape_that_is_not_finite_is_forgotten(num_particles):
    kwargs = {"num_particles": num_particles, "num_islands": 2}
    jala = JALAEM(normal_means, components="joint", **kwargs)
    state = jala.init(random.key(0), SCHOOLS)
    broken = jax.tree.map(lambda block: jnp.full_like(block, jnp.nan), state.factor)
    state = state._replace(num_moves=jnp.zeros((), int), factor=broken)
    new, _ = jax.jit(jala.update)(state, SCHOOLS)
    (block,) = new.factor.blocks
    assert jnp.isfinite(block).all()


def test_a_lone_island_keeps_its_own_step_size():
    jala = JALAEM(normal_means, num_particles=10, num_islands=2, components="joint")
    state = jala.init(random.key(0), SCHOOLS)
    dead = state.cloud.log_weight.at[0].set(-jnp.inf)
    votes = jnp.log(jnp.array([[0.1], [0.2]]))
    state = state._replace(cloud=state.cloud._replace(log_weight=dead), log_step_size=votes)
    sizes = sampler._loo_step_size(jala._last.settings, state)
    np.testing.assert_allclose(sizes, [[0.2], [0.2]], rtol=1e-6)
    _, info = jala.update(state, SCHOOLS)
    assert info.step_size == pytest.approx(0.2)


def test_params_that_no_latent_depends_on_do_not_overshoot():
    # The temperature then rises at one stroke, and the information of a likelihood to the
    # power of zero is none.
    rng = np.random.default_rng(3)
    age = rng.normal(50, 12, size=200).astype(np.float32)
    y = (rng.random(200) < expit(-2 + 0.05 * age)).astype(np.float32)

    def model(age, y):
        intercept, slope = numpyro.param("intercept", 0.0), numpyro.param("slope", 0.0)
        numpyro.sample("unused", dist.Normal())
        numpyro.sample("y", dist.Bernoulli(logits=intercept + slope * age), obs=y)

    def potential(values):
        logits = values[0] + values[1] * age.astype(float)
        return np.sum(np.logaddexp(0, logits) - y * logits)

    best = minimize(potential, [0.0, 0.0], method="Nelder-Mead", tol=1e-10).fun
    jala = JALAEM(model, num_particles=64, num_islands=4)
    jala.run(random.key(0), 40, age, y, progress_bar=False)
    reached = potential([float(jala.params[name]) for name in ("intercept", "slope")])
    assert reached - best < 1e-3
    assert abs(jala.log_evidence + best) < 4 * jala.log_evidence_se + 1e-3
    assert abs(jala.diagnostics()["recursive_log_evidence"] + best) < 1
