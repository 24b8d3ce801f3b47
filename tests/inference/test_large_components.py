"""One large component: chains and crossings, beside a Kalman filter and closed forms."""

import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

from numpyro_jala import JALAEM
from numpyro_jala.engine import sparsity
from numpyro_jala.engine.arrow import Arrow
from numpyro_jala.engine.banded import Band
from numpyro_jala.engine.partition import joint
from numpyro_jala.inference import one_component, patterns
from numpyro_jala.inference.evidence import Bridge

POSITIVE = dist.constraints.positive


def walk(y):
    step = numpyro.param("step", 1.0, constraint=POSITIVE)
    noise = numpyro.param("noise", 2.0, constraint=POSITIVE)

    def body(last, row):
        x = numpyro.sample("x", dist.Normal(last, step))
        numpyro.sample("y", dist.Normal(x, noise), obs=row)
        return x, None

    scan(body, 0.0, y)


def kalman(y, step, noise):
    mean = spread = total = 0.0
    for row in y.astype(float):
        spread += step**2
        forecast = spread + noise**2
        error, gain = row - mean, spread / forecast
        total -= 0.5 * (np.log(2 * np.pi * forecast) + error**2 / forecast)
        mean, spread = mean + gain * error, spread * (1 - gain)
    return total


def draw_walk(length, seed=1):
    rng = np.random.default_rng(seed)
    x = np.cumsum(0.5 * rng.normal(size=length))
    return (x + rng.normal(size=length)).astype(np.float32)


def errors_of(lost, at):
    """Standard errors of two params, from differences of the log-likelihood."""
    moves = 1e-3 * np.eye(2)
    second = np.array(
        [
            [
                lost(at + a + b) - lost(at + a - b) - lost(at - a + b) + lost(at - a - b)
                for a in moves
            ]
            for b in moves
        ]
    )
    return np.sqrt(np.diag(np.linalg.inv(second / 4e-6)))


@pytest.fixture(scope="module")
def fitted():
    y = draw_walk(300)
    jala = JALAEM(walk, num_particles=128)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jala.run(random.key(0), 15, y, progress_bar=False)
    return jala, y


def test_a_chain_has_the_estimate_evidence_and_errors_of_a_kalman_filter(fitted):
    jala, y = fitted

    def lost(logs):
        return -kalman(y, *np.exp(logs))

    best = minimize(lost, np.zeros(2), method="BFGS", options={"gtol": 1e-6})
    errors = errors_of(lost, best.x)
    for i, name in enumerate(("step", "noise")):
        estimate = float(jala.params[name])
        assert abs(np.log(estimate) - best.x[i]) < 0.02 * errors[i]
        ratio = float(jala.standard_errors()[name]) / estimate / errors[i]
        assert abs(ratio - 1) < 0.02
    exact = kalman(y, float(jala.params["step"]), float(jala.params["noise"]))
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se
    assert jala.log_evidence_se < 0.01


def test_the_result_says_where_annealing_began(fitted):
    assert fitted[0].to_inference_data().attrs["reference"] == "Gaussian at the mode"


def test_draws_of_a_chain_are_those_of_the_smoother(fitted):
    """Particles live in other coordinates: what is returned are the model's latents."""
    jala, y = fitted
    step, noise = (float(jala.params[name]) for name in ("step", "noise"))
    times = np.minimum.outer(np.arange(300), np.arange(300)) + 1.0
    prior = step**2 * times
    gain = prior @ np.linalg.inv(prior + noise**2 * np.eye(300))
    mean, spread = gain @ y, np.sqrt(np.diag(prior - gain @ prior))
    draws = np.asarray(jala.to_inference_data().posterior["x"]).reshape(-1, 300)
    z = (draws.mean(0) - mean) / spread * np.sqrt(len(draws))
    # Particles are not quite independent.
    assert z.std() < 2.5 and abs(z.mean()) < 1.0
    np.testing.assert_allclose(draws.std(0) / spread, 1.0, atol=0.35)


def test_a_chain_goes_on_from_its_last_state(fitted):
    jala, y = fitted
    params, evidence = dict(jala.params), jala.log_evidence
    again = JALAEM(walk, num_particles=128)
    again.run(random.key(1), 3, y, progress_bar=False, init_state=jala.last_state)
    for name, value in params.items():
        np.testing.assert_allclose(again.params[name], value, rtol=2e-3)
    assert abs(again.log_evidence - evidence) < 0.01


def test_the_pure_interface_does_not_take_whitened_particles_for_latents(fitted):
    jala, y = fitted
    for step in (jala.update, jala.finish):
        with pytest.raises(ValueError, match="coordinates of a Laplace"):
            step(jala.last_state, y)


def test_what_moves_in_its_own_way_stays_with_its_latents():
    y = draw_walk(150)
    paper = dict(num_islands=1, step_size=0.1, preconditioner=None, num_particles=16)
    jala = JALAEM(walk, **paper)
    first = {"x": np.broadcast_to(y, (16, 150))}
    with pytest.warns(UserWarning, match="not converged"):  # after a single step
        jala.run(random.key(0), 1, y, progress_bar=False, init_particles=first)
    assert jala._run.data.mode is None and jala.last_state.mode is None


def crossed(rows, columns, y):
    """Two crossed effects."""
    sds = numpyro.param("sds", jnp.ones(2), constraint=POSITIVE)
    u = numpyro.sample("u", dist.Normal(0.0, sds[0]).expand([70]))
    v = numpyro.sample("v", dist.Normal(0.0, sds[1]).expand([50]))
    numpyro.sample("y", dist.Normal(u[rows] + v[columns], 1.0), obs=y)


def crossed_log_likelihood(sds, rows, columns, y):
    same = [np.equal.outer(each, each) for each in (rows, columns)]
    covariance = sds[0] ** 2 * same[0] + sds[1] ** 2 * same[1] + np.eye(y.size)
    square = y @ np.linalg.solve(covariance, y.astype(float))
    log_det = np.linalg.slogdet(covariance)[1]
    return -0.5 * (square + log_det + y.size * np.log(2 * np.pi))


def draw_crossed(seed, num_rows=400):
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(size, size=num_rows) for size in (70, 50))
    mean = 0.8 * rng.normal(size=70)[rows] + 0.5 * rng.normal(size=50)[columns]
    return rows, columns, (mean + rng.normal(size=num_rows)).astype(np.float32)


def test_crossed_effects_are_exact_whichever_groups_the_rows_belong_to():
    jala = JALAEM(crossed, num_particles=64)
    for seed in (3, 4):  # other rows, and so another second derivative
        data = draw_crossed(seed)
        jala.run(random.key(0), None, *data, progress_bar=False)
        assert jala.diagnostics()["num_steps"] == 10  # scores at rest do what is left
        assert jala.components["num_components"] == 1
        exact = crossed_log_likelihood(jala.params["sds"], *data)
        assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se + 1e-3
        assert jala.log_evidence_se < 0.01
        best = minimize(
            lambda log_sds, data=data: -crossed_log_likelihood(np.exp(log_sds), *data),
            np.zeros(2),
        )
        errors = jala.standard_errors()["sds"]
        assert np.all(np.abs(jala.params["sds"] - np.exp(best.x)) < 0.02 * errors)


def test_data_whose_arrow_is_too_large_get_a_dense_matrix_and_spoil_no_others(monkeypatch):
    jala, found = JALAEM(crossed), []
    for seed, most in ((3, 2e10), (4, 0.0), (5, 2e10)):
        monkeypatch.setattr(sparsity, "_MOST_WORK", most)
        fixed, arrays, _ = jala._inspect(random.key(0), draw_crossed(seed), {})
        at = fixed.layout.init_params, arrays
        found.append(patterns.lay_out(fixed.layout, *at, 1_000, found))
        again = patterns.lay_out(fixed.layout, *at, 1_000, found)
        assert most == 0.0 or again is found[-1]
    first, second, third = (each.pattern for each in found)
    assert isinstance(second, Band) and second.num_blocks == 1
    assert isinstance(third, Arrow) and not third.equals(first)


def panel(y, groups):
    """Several walks side by side, and groups of a single latent with the same noise."""
    step = numpyro.param("step", 1.0, constraint=POSITIVE)
    noise = numpyro.param("noise", 2.0, constraint=POSITIVE)

    def body(last, row):
        with numpyro.plate("series", y.shape[1]):
            x = numpyro.sample("x", dist.Normal(last, step))
            numpyro.sample("y", dist.Normal(x, noise), obs=row)
        return x, None

    scan(body, jnp.zeros(y.shape[1]), y)
    with numpyro.plate("groups", len(groups)):
        u = numpyro.sample("u", dist.Normal(0.5, 2.0))
        numpyro.sample("z", dist.Normal(u, noise), obs=groups)


def panel_log_likelihood(step, noise, y, groups):
    spread = 4.0 + noise**2
    of_groups = (groups.astype(float) - 0.5) ** 2 / spread + np.log(2 * np.pi * spread)
    return sum(kalman(each, step, noise) for each in y.T) - 0.5 * of_groups.sum()


def draw_panel(num_series=5, length=40):
    y = np.stack([draw_walk(length, seed) for seed in range(num_series)], 1)
    return y, np.random.default_rng(9).normal(0.5, 2.2, 12).astype(np.float32)


def test_several_chains_beside_small_groups_are_those_of_kalman_filters():
    data = draw_panel()
    jala = JALAEM(panel, num_particles=128)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jala.run(random.key(0), 10, *data, progress_bar=False)
    assert jala.components["num_components"] == 5 + 12
    exact = panel_log_likelihood(jala.params["step"], jala.params["noise"], *data)
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se
    assert jala.log_evidence_se < 0.05
    assert jala._run.fixed.layout.pattern.width == 2  # as of a single chain

    def lost(values):
        return -panel_log_likelihood(*np.exp(values), *data)

    best = minimize(lost, np.zeros(2), method="BFGS", options={"gtol": 1e-6})
    estimate, found = (
        np.array([float(values[name]) for name in ("step", "noise")])
        for values in (jala.params, jala.standard_errors())
    )
    errors = errors_of(lost, best.x)
    assert np.all(np.abs(np.log(estimate) - best.x) < 0.02 * errors)
    assert np.all(np.abs(found / estimate / errors - 1) < 0.02)
    draws = np.asarray(jala.to_inference_data().posterior["u"]).reshape(-1, 12)
    shrinkage = 4.0 / (4.0 + estimate[1] ** 2)
    mean, sd = 0.5 + shrinkage * (data[1] - 0.5), np.sqrt(4.0 * (1 - shrinkage))
    z = (draws.mean(0) - mean) / sd * np.sqrt(len(draws))
    assert z.std() < 2.5 and abs(z.mean()) < 1.0  # particles are not quite independent


def test_walks_written_as_sums_of_their_steps_keep_the_band_of_a_walk():
    """Dense second derivatives of 160 latents would take 160 products."""

    def steps(y):
        step = numpyro.param("step", 0.6, constraint=POSITIVE)
        noise = numpyro.param("noise", 1.1, constraint=POSITIVE)
        with numpyro.plate("times", 80, dim=-2), numpyro.plate("series", 2):
            z = numpyro.sample("z", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(step * jnp.cumsum(z, 0), noise), obs=y)

    y = np.stack([draw_walk(80, seed) for seed in range(2)], 1)
    jala = JALAEM(steps, num_particles=64)
    with pytest.warns(UserWarning, match="not converged"):
        jala.run(random.key(0), 0, y, progress_bar=False)
    pattern = jala._run.fixed.layout.pattern
    assert pattern.cost < 6 and jala.components["num_components"] == 2
    exact = sum(kalman(each, 0.6, 1.1) for each in y.T)
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se
    assert jala.log_evidence_se < 0.05


def autoregression(y, seen):
    lags = numpyro.param("lags", jnp.array([0.5, 0.0]))
    step = numpyro.param("step", 0.5, constraint=POSITIVE)
    noise = numpyro.param("noise", 0.5, constraint=POSITIVE)

    def body(last, row):
        x = numpyro.sample("x", dist.Normal(lags[0] * last[0] + lags[1] * last[1], step))
        with numpyro.handlers.mask(mask=row[1]):
            numpyro.sample("y", dist.Normal(x, noise), obs=row[0])
        return (x, last[0]), None

    scan(body, (0.0, 0.0), (y, seen))


def draw_autoregression(length, rng):
    x = np.zeros(length + 2)
    for t in range(2, length + 2):
        x[t] = 1.2 * x[t - 1] - 0.4 * x[t - 2] + 0.5 * rng.normal()
    y = x[2:] + 0.4 * rng.normal(size=length)
    return y.astype(np.float32), rng.random(length) < 0.8


def test_an_autoregression_far_from_its_maximum_gets_there():
    """Steps by products of scores, of which one component has one, went astray."""
    y, seen = draw_autoregression(120, np.random.default_rng(7))
    back = [np.eye(120, k=-k) for k in range(3)]

    def lost(params):
        root = params[2] * np.linalg.inv(
            back[0] - params[0] * back[1] - params[1] * back[2]
        )
        spread = (root @ root.T + params[3] ** 2 * back[0])[np.ix_(seen, seen)]
        return -multivariate_normal(cov=spread).logpdf(y[seen])

    jala = JALAEM(autoregression, num_particles=128)
    jala.run(random.key(0), None, y, seen, progress_bar=False)
    found = np.array(
        [*jala.params["lags"], jala.params["step"], jala.params["noise"]], float
    )
    best = minimize(lost, [1.2, -0.4, 0.5, 0.4], method="Nelder-Mead")
    assert lost(found) - best.fun < 1e-3
    assert abs(jala.log_evidence + lost(found)) < 4 * jala.log_evidence_se + 1e-4


def counts(y):
    step = numpyro.param("step", 0.5, constraint=POSITIVE)

    def body(last, row):
        x = numpyro.sample("x", dist.Normal(last, step))
        numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=row)
        return x, None

    scan(body, 0.0, y)


def test_a_rough_log_evidence_is_estimated_from_more_particles(monkeypatch):
    rng = np.random.default_rng(3)
    y = rng.poisson(np.exp(np.cumsum(0.4 * rng.normal(size=110))))
    jala, found = JALAEM(counts, num_particles=64), []
    for rough in (np.inf, 0.0):
        monkeypatch.setattr(one_component, "_ROUGH", rough)
        jala.run(random.key(0), 10, y, progress_bar=False)
        evaluations = jala.diagnostics()["num_evaluations"]
        found.append((jala.log_evidence, jala.log_evidence_se, evaluations))
    (first, rough, few), (second, precise, many) = found
    assert precise < 0.8 * rough and many > few
    assert abs(first - second) < 4 * rough


@pytest.mark.parametrize("covers", [(0.6, 0.8), (0.8, 0.6), (np.nan, 0.1)])
def test_a_bridge_is_chosen_by_what_it_covers_and_not_by_its_error_bar(covers, monkeypatch):
    errors, islands = (0.02, 0.01), jnp.zeros(4)
    of_two = [
        Bridge(number, error, cover, islands)
        for number, (error, cover) in enumerate(zip(errors, covers, strict=True))
    ]
    given = iter(of_two)
    monkeypatch.setattr(one_component, "_bridge", lambda *_: next(given))
    monkeypatch.setattr(one_component.evidence, "standard", lambda gaussian: gaussian)
    layout = SimpleNamespace(partition=joint(300))
    run = SimpleNamespace(
        data=SimpleNamespace(mode=jnp.zeros(300)), fixed=SimpleNamespace(layout=layout)
    )
    here = SimpleNamespace(gaussian=None)
    chosen = one_component._estimate(run, random.key(0), here)
    assert chosen.log_evidence == np.nanargmax(covers)


def test_latents_without_a_mode_start_from_the_prior():
    """A funnel has no mode: its density grows without bound in the neck."""

    def funnel(y):
        log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 1.0))
        x = numpyro.sample("x", dist.Normal(0.0, jnp.exp(log_scale)).expand([110]))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    y = np.random.default_rng(0).normal(size=110).astype(np.float32)
    jala = JALAEM(funnel, num_particles=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jala.run(random.key(0), 0, y, progress_bar=False)
    assert jala._run.data.from_prior
