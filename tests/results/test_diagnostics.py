"""When a run says that it has failed, or that it has not arrived."""

import warnings

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.stats import multivariate_normal

from numpyro_jala import JALAEM, compare, likelihood_ratio_test, print_comparison
from numpyro_jala.engine.state import REST
from numpyro_jala.inference import evidence
from numpyro_jala.inference.information import Uncertainty
from numpyro_jala.inference.record import Look, Unsettled
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from numpyro_jala.results import diagnostics, log_evidence, summary
from numpyro_jala.results.estimates import estimates


def spoil_rhat(run, value=3e18):
    run.rhat = value  # in place of what is computed when asked for


def spoil_ess(run):
    last = run.infos(REST)
    run.restore(REST, last._replace(ess=np.zeros_like(last.ess)))


def spoil_overlap(run):
    run.finished = run.result._replace(bridge=evidence.unknown(8))


def test_a_healthy_run_has_not_failed(means):
    assert log_evidence.failure(means._run) == ""
    assert means.diagnostics()["raw_log_evidence"] == means.log_evidence
    spoil_rhat(means._run, 4.0)  # as with modes that are far apart, and Gaussians cover
    assert log_evidence.failure(means._run) == ""


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_rhat, "the islands are in different places .r-hat 3.0e.18"),
        (
            lambda run: spoil_rhat(run, np.nan),
            "the islands are in different places .r-hat nan",
        ),
        (spoil_ess, "one particle carries the weight of its island .ESS 0"),
        (spoil_overlap, "no Gaussian fitted to some of the particles meets the others"),
    ],
)
def test_a_run_that_has_failed_gives_no_number(means, spoil, words):
    raw = means.diagnostics()["raw_log_evidence"]
    spoil(means._run)
    assert np.isnan([means.log_evidence, means.log_evidence_se]).all()
    found = means.diagnostics()
    assert np.isnan(found["log_evidence"])
    assert abs(found["raw_log_evidence"] - raw) < 5
    said = diagnostics.warning_messages(means._run)
    with pytest.warns(UserWarning, match=f"NaN, since {words}"):
        warnings.warn(said[0], stacklevel=1)
    text = means._summary(0.9)
    assert "log-evidence unknown, the run has failed" in text and "AIC" not in text
    assert "000000" not in text


def test_a_comparison_says_which_run_has_failed(means, capsys):
    good = means.to_inference_data()
    spoil_rhat(means._run)
    bad = means.to_inference_data()
    assert np.isnan(bad.attrs["log_evidence"])
    with pytest.warns(
        UserWarning, match="Of 'bad' there is no log-evidence to compare: the"
    ):
        table = compare({"bad": bad, "good": good})
    assert list(table.index) == ["good", "bad"]
    assert table["probability"]["good"] == 1 and np.isnan(table["probability"]["bad"])
    assert table["warning"]["good"] == "" and "r-hat" in table["warning"]["bad"]
    print_comparison(table)
    assert "Of bad there is no log-evidence." in capsys.readouterr().out
    smaller = good.copy()
    smaller.attrs = {**good.attrs, "num_params": 1}
    assert np.isnan(likelihood_ratio_test(smaller, bad).p_value)


def test_advice_fits_the_settings(means):
    run = means._run
    spoil_ess(run)
    spoil_rhat(run)
    said = " ".join(diagnostics.warning_messages(run))
    assert "reference='laplace'" in said and "step_size" not in said
    settings = run.fixed.settings._replace(step_size=0.25)
    run.fixed = run.fixed._replace(settings=settings)
    run.last_state = run.last_state._replace(num_steps=jnp.zeros((), int))
    spoil_overlap(run)
    bridge = run.result.bridge
    run.finished = run.result._replace(bridge=bridge, recursive=np.full(8, np.nan))
    said = " ".join(diagnostics.warning_messages(run))
    assert "a step_size below 0.25" in said and "num_steps=0" not in said


@pytest.mark.parametrize(
    ("nats", "error", "is_said"),
    [(0.4, 0.01, False), (0.6, 0.01, True), (0.6, 0.1, False), (-3.0, 0.1, False)],
)
def test_a_rise_beyond_chance_is_said(means, nats, error, is_said):
    run = means._run
    run.finished = run.result._replace(uncertainty=None)
    now = run.result.bridge
    run.looks = [Look(45, float(now.log_evidence) - nats, error, np.nan)]
    said = " ".join(diagnostics.warning_messages(run))
    words = f"over the last 15 steps the log-evidence still rose by {nats:g} nats"
    assert (words in said) == is_said
    assert f"rise over the last 15 steps {nats:g} nats" in means._summary(0.9)
    np.testing.assert_allclose(means.diagnostics()["last_rise"], nats, atol=1e-5)


def test_a_score_that_is_not_finite_is_said(means):
    run = means._run
    assert diagnostics.warning_messages(run) == []
    unknown = run.result.uncertainty._replace(shortfall=np.nan)
    run.finished = run.result._replace(uncertainty=unknown)
    assert "the score not being finite" in " ".join(diagnostics.warning_messages(run))


@pytest.mark.parametrize(("share", "is_said"), [(0.19, False), (0.21, True)])
def test_particles_that_remember_are_said_to_be_slow(means, share, is_said):
    means._run.unsettled = Unsettled(2, share)
    said = " ".join(diagnostics.warning_messages(means._run))
    assert (f"{share:.0%} is left of how x[2] differed" in said) == is_said


@pytest.mark.parametrize(("shape", "is_said"), [(0.95, False), (1.05, True)])
def test_weights_without_a_mean_are_said(means, shape, is_said):
    result = means._run.result
    pair = evidence.Compared(result.bridge, result.bridge, True, shape)
    means._run.finished = result._replace(compared=pair)
    said = " ".join(diagnostics.warning_messages(means._run))
    assert (f"heavy tail (Pareto k {shape:.2f})" in said) == is_said


def decoder(y):
    """Probabilistic principal components: as many params as entries of the loadings."""
    loadings = numpyro.param("loadings", lambda key: 0.3 * random.normal(key, (22, 3)))
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(z @ loadings.T, noise).to_event(1), obs=y)


def decoder_shortfall(params, y):
    """How far the likelihood is below its maximum, which is known (Tipping & Bishop)."""
    y, (rows, dim) = y.astype(float), y.shape
    values = np.linalg.eigvalsh(y.T @ y / rows)[::-1]
    spread = np.log(values[:3]).sum() + (dim - 3) * np.log(values[3:].mean())
    best = -rows / 2 * (dim * np.log(2 * np.pi) + spread + dim)
    loadings = np.asarray(params["loadings"], float)
    covariance = loadings @ loadings.T + float(params["noise"]) ** 2 * np.eye(dim)
    return best - multivariate_normal(np.zeros(dim), covariance).logpdf(y).sum()


@pytest.mark.slow
def test_a_decoder_says_that_it_has_not_arrived():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(25, 3)) @ rng.normal(size=(3, 22))
    y += 0.5 * rng.normal(size=y.shape)
    y = y.astype(np.float32)
    jala = JALAEM(decoder)
    for seed in range(3):
        with pytest.warns(UserWarning, match="have not converged: over the last 50 steps"):
            jala.run(random.key(seed), 200, y, progress_bar=False)
        assert decoder_shortfall(jala.params, y) > 2
    jala.run(random.key(0), 1_000, y, progress_bar=False)
    assert decoder_shortfall(jala.params, y) < 0.5


def test_a_constant_entry_has_as_many_effective_draws_as_the_weights_allow():
    rng = np.random.default_rng(0)
    weight = rng.random((4, 8)) + 0.1
    weight /= weight.sum()
    for constant in (0.0, 1.0, 0.1):
        values = np.full((4, 8), constant, np.float32)
        found = summary.effective_size(values, weight)
        np.testing.assert_allclose(found, 1 / np.sum(weight**2), rtol=1e-6)


def test_rough_standard_errors_are_named(means):
    known = means._run.result.uncertainty
    assert known.error.shape == (2,) and (known.error < 0.05).all()
    rough = known._replace(error=np.array([0.04, 0.31]))
    means._run.finished = means._run.result._replace(uncertainty=rough)
    said = [text for text in diagnostics.warning_messages(means._run) if "roughly" in text]
    assert len(said) == 1 and "standard error of tau (\N{PLUS-MINUS SIGN} 31%)" in said[0]


def test_intervals_of_a_cholesky_factor_stay_within_one():
    def model(y):
        root = numpyro.param("root", jnp.eye(2), constraint=constraints.corr_cholesky)
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        numpyro.sample("y", dist.MultivariateNormal(z, scale_tril=root), obs=y)

    y = np.zeros((4, 2), np.float32)
    layout = lay_out(model, run_once(model, random.key(0), (y,), {}), (y,), {})
    flat = np.ones((1, 1))
    known = Uncertainty(9 * flat, np.array([True]), np.zeros(1), 0.0, np.zeros(1))
    for prob in (0.5, 0.9, 0.999):
        found = estimates(layout, jnp.array([0.9]), known, prob)["root"]
        assert np.isfinite(found.standard_error).all()
        assert found.low.min() >= -1 and found.high.max() <= 1
