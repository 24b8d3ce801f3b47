"""The public class on models with exact answers."""

import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import Predictive
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoLaplaceApproximation
from scipy.stats import multivariate_normal, norm

from numpyro_jala import JALAEM
from numpyro_jala.engine import weights
from numpyro_jala.engine.state import EM_STEP, REST
from numpyro_jala.inference import programs
from tests.tools import (
    SCHOOLS,
    assert_mean,
    normal_means,
    normal_means_log_likelihood,
    regression,
    regression_data,
    regression_log_evidence,
)

BEST = normal_means_log_likelihood(
    {"mu": SCHOOLS.mean(), "tau": np.sqrt(SCHOOLS.astype(float).var() - 1)}
)


@pytest.fixture(scope="module")
def linear():
    jala = JALAEM(regression, num_particles=128)
    jala.run(random.key(0), 0, *regression_data(), progress_bar=False)
    return jala


def test_the_estimate_maximises_the_marginal_likelihood(means):
    assert normal_means_log_likelihood(means.params) > BEST - 0.01
    assert means.diagnostics()["shortfall"] < 0.01


def test_the_particles_come_to_rest_at_the_estimate(means):
    rest = means._run.infos(REST)
    np.testing.assert_allclose(rest.params[-1], means._run.result.params, rtol=1e-6)
    assert (means.last_state.target.params != means._run.result.params).all()


def test_the_log_evidence_is_that_at_the_estimate(means):
    exact = normal_means_log_likelihood(means.params)
    assert 0 < means.log_evidence_se < 0.05
    assert abs(means.log_evidence - exact) < 5 * means.log_evidence_se


def test_weighted_particles_have_the_moments_of_the_posterior(means):
    samples, log_weight = means.get_weighted_samples()
    np.testing.assert_allclose(np.exp(log_weight).sum(), 1, rtol=1e-5)
    mu, variance = means.params["mu"], means.params["tau"] ** 2
    expected = (variance * SCHOOLS + mu) / (1 + variance)
    sd = np.sqrt(variance / (1 + variance))
    assert samples["x"].shape == (256, 6) and samples["total"].shape == (256,)
    found = np.exp(log_weight) @ samples["x"]
    np.testing.assert_allclose(found, expected, atol=5 * sd / np.sqrt(128))
    equal = means.get_samples()["x"]
    np.testing.assert_allclose(equal.mean(0), found, atol=0.05)
    np.testing.assert_allclose(samples["total"], samples["x"].sum(1), rtol=1e-4)


def test_predictive_takes_the_result(means):
    predict = Predictive(normal_means, means.get_samples(), params=means.params)
    drawn = predict(random.key(0))["y"]
    assert drawn.shape == (256, 6)
    assert abs(drawn.mean() - means.params["mu"]) < 0.5


def test_the_summary_names_what_one_wants_to_know(means, capsys):
    means.print_summary()
    printed = capsys.readouterr().out
    for text in ("mu", "tau", "x[5]", "log-evidence", "steps 60", "5.0%"):
        assert text in printed


def test_a_run_in_two_halves_is_bit_identical_and_a_second_run_compiles_nothing(
    compilations, means
):
    whole = means.params, means.log_evidence, means.get_samples()
    means.run(random.key(0), 30, SCHOOLS, progress_bar=False)
    half = means.last_state
    said(means, 30, SCHOOLS, init_params={"mu": 1.0})
    compilations.clear()
    said(means, 30, SCHOOLS, init_params={"mu": 30.0})  # which takes longer to anneal
    means.run(random.key(7), 30, SCHOOLS, init_state=half, progress_bar=False)
    assert not compilations
    assert means.params == whole[0] and means.log_evidence == whole[1]
    for name, value in whole[2].items():
        np.testing.assert_array_equal(means.get_samples()[name], value)


def test_numbers_of_python_do_not_compile_the_walk_twice():
    def model(y):
        x = numpyro.sample("x", dist.Normal(numpyro.param("mu", 0.0), 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    before = programs.run_steps.num_compiled
    jala = JALAEM(model, optax.sgd(0.1), num_particles=32, num_islands=4)
    jala.run(random.key(0), 25, SCHOOLS[0], init_params={"mu": 0.5}, progress_bar=False)
    assert programs.run_steps.num_compiled == before + 1


@pytest.mark.parametrize("first", [{"mu": 0.2, "tau": 1.1}, {"mu": 1.4, "tau": 1.9}])
def test_without_steps_params_stay_and_what_is_short_is_said(compiled_means, first):
    text = said(compiled_means, 0, SCHOOLS, init_params=first)
    for name, value in first.items():
        np.testing.assert_allclose(compiled_means.params[name], value, rtol=1e-6)
    exact = normal_means_log_likelihood(first)
    error = compiled_means.log_evidence_se
    assert abs(compiled_means.log_evidence - exact) < 4 * error < 0.1
    assert "nats short" in text
    assert 1 / 2 < compiled_means.diagnostics()["shortfall"] / (BEST - exact) < 2


def test_what_the_latents_do_not_inform_is_not_thrown_far():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        s = numpyro.param("s", 60.0, constraint=constraints.positive)
        numpyro.sample("y", dist.Normal(0.1 * x, s), obs=y)

    y = np.linspace(-1.5, 2.5, 20).astype(np.float32)
    jala = JALAEM(model, num_particles=128)
    exact = lambda s: multivariate_normal(  # noqa: E731
        cov=s**2 * np.eye(20) + 0.01
    ).logpdf(y)
    for num_steps in (1, 6):
        said(jala, num_steps, y)
        last = float(jala.get_params(jala.last_state)["s"])
        assert exact(float(jala.params["s"])) > exact(last) - 0.01
        assert abs(jala.log_evidence - exact(float(jala.params["s"]))) < 0.05


RESUME = """
import sys, jax, numpy as np
from jax import random
sys.path.insert(0, {root!r})
from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means
jala = JALAEM(normal_means, num_particles=64)
path = {path!r}
if {first}:
    jala.run(random.key(0), 20, SCHOOLS, progress_bar=False)
    leaves = [random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
              else x for x in jax.tree.leaves(jala.last_state)]
    np.savez(path, *leaves)
    jala.run(random.key(0), 40, SCHOOLS, progress_bar=False)
else:
    blank = jax.eval_shape(lambda key: jala.init(key, SCHOOLS), random.key(0))
    saved = list(np.load(path).values())
    leaves = [random.wrap_key_data(v) if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key)
              else jax.numpy.asarray(v) for b, v in zip(jax.tree.leaves(blank), saved)]
    state = jax.tree.unflatten(jax.tree.structure(blank), leaves)
    jala.run(random.key(5), 20, SCHOOLS, init_state=state, progress_bar=False)
print(float(jala.params["mu"]).hex(), jala.log_evidence.hex())
"""


@pytest.mark.slow
def test_a_run_continued_in_another_process_is_bit_identical(tmp_path, request):
    printed = []
    for first in (True, False):
        script = RESUME.format(
            root=str(request.config.rootpath), path=str(tmp_path / "s.npz"), first=first
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            check=True,
        )
        printed.append(done.stdout)
    assert printed[0] == printed[1] and "0x" in printed[0]


def test_evidence_without_params_is_unbiased_at_small_size(linear):
    exact = regression_log_evidence(*regression_data())
    errors, scaled, recursive = [], [], []
    for seed in range(60):
        linear.run(random.key(seed), 0, *regression_data(), progress_bar=False)
        errors.append(linear.log_evidence - exact)
        scaled.append(errors[-1] / linear.log_evidence_se)
        recursive.append(np.exp(linear.diagnostics()["recursive_log_evidence"] - exact))
    assert_mean(np.exp(errors), 1.0, resolution=0.02)
    assert_mean(recursive, 1.0, resolution=0.35)
    assert 0.7 < np.std(scaled) < 1.4


@pytest.mark.parametrize("reference", ["laplace", "guide", "fitted"])
def test_other_references_lead_to_the_same_evidence(reference):
    exact = regression_log_evidence(*regression_data())
    guide = reference
    if reference == "guide":
        guide = AutoDiagonalNormal(regression)
    if reference == "fitted":
        laplace = AutoLaplaceApproximation(regression)
        svi = numpyro.infer.SVI(
            regression, laplace, optax.adam(0.05), numpyro.infer.Trace_ELBO()
        )
        fit = svi.run(random.key(0), 500, *regression_data(), progress_bar=False)
        guide = (laplace, fit.params)
    jala = JALAEM(regression, num_particles=128, reference=guide)
    jala.run(random.key(1), 0, *regression_data(), progress_bar=False)
    assert abs(jala.log_evidence - exact) < 5 * jala.log_evidence_se < 0.1


def heavy(y=None):
    """Cauchy tails on the log scale: a Laplace approximation is far off."""
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("J", 5):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(tau * z, 8.0), obs=y)


def test_a_laplace_reference_without_a_mode_is_a_sentence():
    def broken(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.factor("rise", x**2 + jnp.sum(y * x))

    jala = JALAEM(broken, reference="laplace", num_particles=64)
    for y in (np.zeros(2), np.array([1.0, np.inf])):
        with pytest.raises(ValueError, match="found no mode.*unconstrained latents"):
            jala.run(random.key(0), 0, y, progress_bar=False)


def test_heavy_tails_do_not_fool_a_laplace_reference():
    y = jnp.array([14.0, -3.0, 6.0, 1.0, -9.0])
    log_tau = jnp.linspace(-25, 16, 200_001)
    tau = jnp.exp(log_tau)
    log_prior = jnp.log(2 / (jnp.pi * 5)) - jnp.log1p((tau / 5) ** 2) + log_tau
    sd = jnp.sqrt(tau**2 + 64)
    log_lik = -0.5 * jnp.sum(y**2) / sd**2 - 5 * jnp.log(sd) - 2.5 * jnp.log(2 * jnp.pi)
    exact = jax.scipy.special.logsumexp(log_prior + log_lik) + jnp.log(
        log_tau[1] - log_tau[0]
    )
    jala = JALAEM(heavy, reference="laplace", num_particles=256)
    jala.run(random.key(0), 0, y, progress_bar=False)
    assert abs(jala.log_evidence - exact) < max(0.05, 4 * jala.log_evidence_se)


PAPER = dict(
    num_particles=40,
    num_islands=1,
    step_size=0.1,
    preconditioner=None,
    components="joint",
)


def posterior_draws(seed, params=None):
    mu, tau = (params or {"mu": 0.0, "tau": 0.5}).values()
    shrink = tau**2 / (1 + tau**2)
    mean, sd = mu + shrink * (SCHOOLS - mu), np.sqrt(shrink)
    return {"x": mean + sd * np.random.default_rng(seed).normal(size=(40, 6))}


@pytest.fixture(scope="module")
def paper():
    return JALAEM(normal_means, optax.adam(0.005), ess_threshold=0.0, **PAPER)


def run_paper(jala, seed):
    exact = normal_means_log_likelihood({"mu": 0.0, "tau": 0.5})
    return jala.run(
        random.key(seed),
        50,
        SCHOOLS,
        progress_bar=False,
        init_particles=posterior_draws(seed),
        init_log_evidence=exact,
    )


# Fifty small steps do not come to the maximum, and every run says so.
@pytest.mark.filterwarnings("ignore:The parameters have not converged")
def test_the_algorithm_as_printed_tracks_the_evidence(paper):
    errors = []
    for seed in range(60):
        trace = run_paper(paper, seed)["em_trace"]
        end = {name: trace[name].values[-1] for name in ("mu", "tau")}
        exact = normal_means_log_likelihood(end)
        errors.append(np.exp(trace["log_evidence"].values[-1] - exact))
        np.testing.assert_allclose(paper.params["mu"], end["mu"], rtol=1e-5)
    assert_mean(errors, 1.0, resolution=0.1)
    assert len(trace["mu"]) == 50 and abs(end["mu"]) > 0.15


def test_adam_moves_as_on_the_exact_score_with_many_particles():
    jala = JALAEM(
        normal_means,
        optax.sgd(0.01),
        ess_threshold=0.0,
        **(PAPER | {"num_particles": 4_000}),
    )
    particles = {"x": np.concatenate([posterior_draws(i)["x"] for i in range(100)])}
    exact = normal_means_log_likelihood({"mu": 0.0, "tau": 0.5})
    with pytest.warns(UserWarning, match="nats short"):
        jala.run(
            random.key(0),
            3,
            SCHOOLS,
            progress_bar=False,
            init_particles=particles,
            init_log_evidence=exact,
        )
    mu, log_tau = 0.0, np.log(0.5)
    for _ in range(3):
        variance = 1 + np.exp(2 * log_tau)
        residual = SCHOOLS.astype(float) - mu
        up = residual.sum() / variance
        up_tau = np.sum(residual**2 / variance - 1) / variance * np.exp(2 * log_tau)
        mu, log_tau = mu + 0.01 * up, log_tau + 0.01 * up_tau
    np.testing.assert_allclose(jala.params["mu"], mu, rtol=0.03)
    np.testing.assert_allclose(jala.params["tau"], np.exp(log_tau), rtol=0.03)


def test_a_step_traces_the_model_once():
    count = []

    def model(y=None):
        count.append(1)
        return normal_means(y)

    jala = JALAEM(model, optax.adam(0.01), num_particles=32)
    state = jax.eval_shape(lambda key: jala.init(key, SCHOOLS), random.key(0))
    fixed = next(iter(jala._fixed.values()))
    from numpyro_jala.engine import sampler

    def step(state):
        problem = programs.problem_of(fixed, programs.Data([jnp.asarray(SCHOOLS)], None))
        stage = jnp.asarray(2)
        return sampler.step(
            problem, fixed.settings, state, stage, state.target.params, stage
        )

    count.clear()
    jax.eval_shape(step, state)
    assert len(count) == 1


def test_init_and_update_jit_and_vmap():
    jala = JALAEM(normal_means, num_particles=32, num_islands=4)

    def fit(key):
        state = jala.init(key, jnp.asarray(SCHOOLS))
        state, info = jala.update(state, jnp.asarray(SCHOOLS))
        return state.target.params, jala.evaluate(state), info.ess

    params, log_evidence, ess = jax.jit(jax.vmap(fit))(random.split(random.key(0), 3))
    assert params.shape == (3, 2) and ess.shape == (3,)
    assert (
        np.isfinite(log_evidence).all() and len(set(np.asarray(log_evidence).tolist())) == 3
    )


def test_many_parameters_climb_with_the_default():
    def model(y=None):
        w = numpyro.param("w", jnp.zeros(70))
        x = numpyro.sample("x", dist.Normal(0.0, 0.5))
        numpyro.sample("y", dist.Normal(w + x, 1.0), obs=y)

    y = np.linspace(-1, 2, 70).astype(np.float32)
    jala = JALAEM(model, num_particles=64, num_islands=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jala.run(random.key(0), 150, y, progress_bar=False)
    assert np.mean((jala.params["w"] - y) ** 2) < 0.3 * np.mean(y**2)
    assert np.isnan(jala.diagnostics()["shortfall"])
    with pytest.raises(ValueError, match="70 parameters"):
        jala.standard_errors()
    jala.print_summary()


def said(jala, num_steps, *args, **kwargs):
    """Return all that a run warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(0), num_steps, *args, progress_bar=False, **kwargs)
    return " ".join(str(warning.message) for warning in caught)


def test_an_interrupted_run_ends_with_what_is_there(means, monkeypatch):
    run_steps, calls = programs.run_steps, []

    def interrupted(fixed, data, state, stage, *rest):
        calls.append(int(stage))
        if calls.count(EM_STEP) == 2 and int(stage) == EM_STEP:
            raise KeyboardInterrupt
        return run_steps(fixed, data, state, stage, *rest)

    interrupted.lower = run_steps.lower
    monkeypatch.setattr(programs, "run_steps", interrupted)
    assert "Interrupted after 10 of 60" in said(means, 60, SCHOOLS)
    assert int(means.last_state.num_steps) == 10 and np.isfinite(means.log_evidence)


def test_when_all_particles_die_the_last_good_state_is_kept(means, monkeypatch):
    good, run_steps = [], programs.run_steps

    def deadly(fixed, data, state, *rest):
        new, infos, count = run_steps(fixed, data, state, *rest)
        if len(good) == 3:
            dead = jnp.full_like(new.cloud.log_weight, -jnp.inf)
            return new._replace(cloud=new.cloud._replace(log_weight=dead)), infos, count
        good.append(new)
        return new, infos, count

    deadly.lower = run_steps.lower
    monkeypatch.setattr(programs, "run_steps", deadly)
    heard = said(means, 200, SCHOOLS)
    assert (
        "kept in last_state. Stopped after" in heard and "near the parameters mu" in heard
    )
    assert "The log-evidence is NaN, since nearly every particle died" in heard
    assert means.last_state is good[-1]
    last = means.get_params(good[-1])
    np.testing.assert_allclose(means.params["mu"], last["mu"], atol=1.0)
    num_steps = int(good[-1].num_steps)
    assert means.diagnostics()["num_steps"] == num_steps > 0
    assert np.isnan([means.log_evidence, means.log_evidence_se]).all()
    assert np.isfinite(means.get_samples()["x"]).all()


def test_far_modes_are_weighed_if_latents_are_few_and_said_if_many():
    def far_modes(dim):
        x = numpyro.sample("x", dist.Normal(0.0, 50.0).expand([dim]).to_event(1))
        bumps = -50 * (x[0] - 60) ** 2, -50 * (x[0] + 60) ** 2
        numpyro.factor("modes", jnp.logaddexp(*bumps) + x[0] * x[1:].sum() / 1e6)

    jala = JALAEM(far_modes, num_particles=64)
    assert "disagree" in said(jala, 0, 14)
    said(jala, 0, 1)
    # Two normal bumps with the variance of a hundredth, under a wide normal prior.
    exact = np.log(2 * np.sqrt(2 * np.pi / 100)) + norm(60, np.sqrt(2500.01)).logpdf(0)
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se < 0.5


def test_mass_lost_at_the_edge_of_the_support_is_said():
    def heaped(y=None):
        p = numpyro.sample("p", dist.Beta(0.1, 0.1))
        q = numpyro.sample("q", dist.Beta(2.0, 3.0))
        numpyro.sample("y", dist.Bernoulli(p * q), obs=y)

    text = said(JALAEM(heaped, num_particles=128), 0, np.float32(1.0))
    assert "'p' from its prior" in text and "edge" in text and "'q'" not in text


def test_islands_in_different_places_have_a_large_r_hat():
    values = np.random.default_rng(0).normal(size=(4, 500, 2))
    weight = np.full((4, 500), 1 / 500)
    assert weights.potential_scale_reduction(weight, values) < 1.02
    values[2, :, 1] += 2.0  # variance of the four means: 1
    found = weights.potential_scale_reduction(weight, values)
    np.testing.assert_allclose(found, np.sqrt(2), rtol=0.05)


def start_where_it_is_not_concave():
    """Return what a run takes to begin where the likelihood is not concave."""
    first = {"mu": 0.0, "tau": 0.45}
    draws = np.concatenate([posterior_draws(seed, first)["x"] for seed in range(7)])
    return {
        "init_params": first,
        "init_particles": {"x": draws[:256].astype(np.float32)},
        "init_log_evidence": normal_means_log_likelihood(first),
    }


def test_too_few_steps_are_said():
    jala = JALAEM(normal_means, optax.adam(0.1), num_particles=256)
    text = said(jala, 2, SCHOOLS, **start_where_it_is_not_concave())
    shortfall = BEST - normal_means_log_likelihood(jala.params)
    assert "nats short" in text and "hardly" not in text and shortfall > 0.2
    assert 1 / 3 < jala.diagnostics()["shortfall"] / shortfall < 3


def test_few_steps_are_enough_where_scores_lead_on(compiled_means):
    text = said(compiled_means, 2, SCHOOLS, **start_where_it_is_not_concave())
    assert text == ""
    assert BEST - normal_means_log_likelihood(compiled_means.params) < 0.01


def test_a_slower_path_has_more_temperatures_and_more_moves_at_each():
    x, y = regression_data()
    rises = {}
    for annealing_effort in (1, 16):
        jala = JALAEM(regression, num_particles=128, annealing_effort=annealing_effort)
        idata = jala.run(random.key(0), 0, x, y, progress_bar=False)
        temperature = idata["anneal_trace"]["temperature"]
        rises[annealing_effort] = np.flatnonzero(np.diff(temperature) > 0)
        error = jala.log_evidence - regression_log_evidence(x, y)
        assert abs(error) < 4 * jala.log_evidence_se < 0.2
    assert set(np.diff(rises[1])) == {2} and set(np.diff(rises[16])) == {5}
    assert 3 < len(rises[16]) / len(rises[1]) < 5


def test_a_whole_fit_is_pure():
    jala = JALAEM(normal_means, num_particles=64)

    def fit(rng_key, y):
        state = jala.init(rng_key, y)
        state = jax.lax.fori_loop(0, 60, lambda _, s: jala.update(s, y)[0], state)
        return jala.finish(state, y)

    data = np.stack([SCHOOLS, 1.5 * SCHOOLS - 1])
    keys = random.split(random.key(0), 2)
    found = jax.jit(lambda *all_: jax.lax.map(lambda one: fit(*one), all_))(keys, data)
    for i, y in enumerate(data):
        params = {name: value[i] for name, value in found.params.items()}
        exact = normal_means_log_likelihood(params, y)
        best = {"mu": y.mean(), "tau": np.sqrt(y.astype(float).var() - 1)}
        assert normal_means_log_likelihood(best, y) - exact < 0.02
        error = found.log_evidence[i] - exact
        assert abs(error) < 4 * found.standard_error[i] < 0.3


def test_one_island_alone_cannot_be_finished():
    jala = JALAEM(normal_means, optax.sgd(0.1), **PAPER)
    with pytest.raises(ValueError, match="num_islands=1 leaves no other island"):
        jala.finish(None, SCHOOLS)
