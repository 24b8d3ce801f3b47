"""Where no number of steps is given, a run takes as many as it needs."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints

from numpyro_jala import JALAEM, PGD
from numpyro_jala.datasets import load_epil
from numpyro_jala.engine import em
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.state import EM_STEP, Info
from numpyro_jala.inference import loop, progress
from tests.inference.test_checkpoint import assert_same, everything
from tests.tools import (
    SCHOOLS,
    assert_mean,
    normal_means,
    normal_means_log_likelihood,
    regression,
    regression_data,
)

#: Of the data alone, each of the six is normal with mean mu and variance 1 + tau^2.
BEST = {"mu": SCHOOLS.mean(), "tau": np.sqrt(SCHOOLS.var() - 1)}
NEAR, FAR = {"mu": 1.0, "tau": 0.5}, {"mu": -20.0, "tau": 0.1}
#: Where the likelihood is not concave, 0.9 nats below its maximum.
FLAT = {"mu": BEST["mu"], "tau": 0.1}


def shortfall(jala):
    return normal_means_log_likelihood(BEST) - normal_means_log_likelihood(jala.params)


def run(jala, *args, num_steps=None, seed=0, **options):
    return jala.run(random.key(seed), num_steps, *args, progress_bar=False, **options)


@pytest.mark.parametrize("start", [NEAR, FLAT, FAR], ids=["near", "flat", "far"])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_stops_at_the_maximum_and_says_after_how_many_steps(means, start, seed):
    idata = run(means, SCHOOLS, init_params=start, seed=seed)
    assert shortfall(means) < 0.01
    num_steps = means.diagnostics()["num_steps"]
    assert num_steps == idata["em_trace"].sizes["step"] == int(means.last_state.num_steps)
    assert f"steps {num_steps:.0f} " in means._summary(0.9)
    assert 20 <= num_steps <= 300


def test_the_path_itself_is_at_the_maximum_where_it_stops(means):
    """What comes after the steps improves the estimate, and must not be what saves it."""
    for seed in range(3):
        run(means, SCHOOLS, init_params=FAR, seed=seed)
        path = means._run.infos(EM_STEP).params[-10:].mean(0)
        there = dict(mu=path[0], tau=np.exp(path[1]))
        best = normal_means_log_likelihood(BEST)
        assert best - normal_means_log_likelihood(there) < 0.02


@pytest.mark.filterwarnings("ignore:The (data hardly|parameters have not)")
def test_a_looser_tolerance_takes_fewer_steps(means):
    counts = []
    for tol in (1.0, 1e-4):
        run(means, SCHOOLS, init_params=FAR, tol=tol)
        counts.append(means.diagnostics()["num_steps"])
    assert counts[0] < counts[1], counts


def test_a_run_of_which_a_part_was_kept_stops_where_the_whole_does(
    means, tmp_path, monkeypatch
):
    options = {"init_params": FAR, "checkpoint_every": 7}
    run(means, SCHOOLS, init_params=FAR)
    whole = everything(means)
    path, steps = tmp_path / "run.npz", loop.run_steps

    def killed(current, state, stage, *rest):
        if current.count(EM_STEP) > 16:
            raise RuntimeError("killed")
        return steps(current, state, stage, *rest)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
        patch.setattr(loop, "run_steps", killed)
        run(means, SCHOOLS, checkpoint=path, **options)
    for _ in range(2):  # the second is told the end of the first
        run(means, SCHOOLS, checkpoint=path, **options)
        assert_same(everything(means), whole)
    with pytest.raises(ValueError, match="more than num_steps=20"):
        run(means, SCHOOLS, num_steps=20, checkpoint=path, **options)


def test_after_the_most_steps_the_shortfall_is_said(means, monkeypatch):
    monkeypatch.setattr(progress, "MOST_STEPS", 60)
    with pytest.warns(UserWarning, match="after 60 steps.*within tol=1e-12, .* nats short"):
        run(means, SCHOOLS, init_params=NEAR, tol=1e-12)


def test_a_given_optimiser_is_looked_at_until_it_arrives():
    jala = JALAEM(normal_means, optax.adam(0.05), num_particles=256)
    run(jala, SCHOOLS, init_params={"mu": -2.0, "tau": 0.5})
    assert shortfall(jala) < 0.1
    num_steps = jala.diagnostics()["num_steps"]
    looks = jala._run.looks
    assert [look.num_steps for look in looks] == [100 * 2**i for i in range(len(looks))]
    assert looks[-1].num_steps == num_steps
    assert looks[-1].log_evidence == jala.log_evidence  # a look is what the end will be


def test_without_params_there_are_no_steps():
    x, y = regression_data()
    jala = JALAEM(regression, num_particles=128)
    run(jala, x, y)
    assert jala.diagnostics()["num_steps"] == 0 and int(jala.last_state.num_steps) == 0


def test_what_cannot_tell_when_it_has_arrived_is_refused():
    alone = {"num_islands": 1, "step_size": 0.1, "preconditioner": None}
    jala = JALAEM(normal_means, optax.sgd(0.1), num_particles=8, **alone)
    start = {"init_particles": {"x": np.zeros((8, 6), np.float32)}}
    with pytest.raises(ValueError, match="num_steps=None .* num_islands=1"):
        run(jala, SCHOOLS, **start)
    with pytest.raises(ValueError, match="num_steps=None is not a number"):
        run(PGD(normal_means, optax.sgd(0.1), step_size=0.1), SCHOOLS)
    with pytest.raises(ValueError, match="tol=0.* is not positive"):
        run(jala, SCHOOLS, tol=0.0, **start)


# -- the rule by itself ------------------------------------------------------------------

COMPLETE = np.array([[4.0, 1.0], [1.0, 2.0]])
MISSING = np.array([[1.0, 0.5], [0.5, 1.5]])
NEWTON = em.Newton(COMPLETE, MISSING, *4 * [None])


def records(params, decrement):
    blank = dict.fromkeys(Info._fields)
    return Info(**{**blank, "params": params, "newton_decrement": decrement})


def test_the_scatter_of_means_is_in_nats():
    means = np.array([[0.3, -0.2], [0.1, 0.0], [0.0, 0.4], [-0.1, 0.1]])
    jitter = np.tile([0.01, -0.01], 6)[:, None]  # means of twelve steps do not see it
    late = np.concatenate([mean + jitter for mean in means])
    params = np.concatenate([np.full((52, 2), 9.0), late])
    covariance = np.cov(means.T)
    expected = 0.5 * np.sum(covariance * (COMPLETE - MISSING))
    np.testing.assert_allclose(progress.scatter_of_means(params, NEWTON), expected)
    nothing_observed = NEWTON._replace(missing=COMPLETE)
    least = 0.5 * em.FLOOR * np.sum(covariance * COMPLETE)
    np.testing.assert_allclose(progress.scatter_of_means(params, nothing_observed), least)


def test_the_scatter_of_noise_is_four_times_the_error_of_the_mean():
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(np.linalg.inv(COMPLETE - MISSING))
    noise = rng.normal(size=(4_000, 200, 2)) @ root.T
    scatters = np.array([progress.scatter_of_means(each, NEWTON) for each in noise])
    means = noise[:, 100:].mean(1)
    errors = 0.5 * np.einsum("ip,pq,iq->i", means, COMPLETE - MISSING, means)
    assert_mean(scatters - 4 * errors, 0.0, resolution=0.01)
    assert_mean(scatters, 4 * 0.5 * 2 / 100, resolution=0.002)


@pytest.mark.parametrize(
    ("num_steps", "last", "before", "is_enough"),
    [
        (40, 1e-3, 5.0, True),  # near
        (40, 0.05, 0.05, False),  # too early to call it noise
        (200, 0.05, 0.05, True),  # noise
        (200, 0.05, 0.08, False),  # still falls
    ],
)
def test_a_decrement_that_does_not_fall_is_noise(num_steps, last, before, is_enough):
    decrement = np.repeat([9.0, 9.0, before, last], num_steps // 4)
    still, moving = np.zeros((num_steps, 2)), np.linspace(0, 1, num_steps)[:, None]
    assert progress.is_at_rest(records(still, decrement), NEWTON, 0.01) == is_enough
    travelling = records(still + moving, decrement)
    assert not progress.is_at_rest(travelling, NEWTON, 0.01)


def test_looks_tell_a_rise_from_noise():
    def arrived(rise, error, short):
        run = type("Run", (), {})()
        run.earlier = progress.Look(100, -5.0, error, np.nan)
        run.looks = [run.earlier, progress.Look(200, -5.0 + rise, error, short)]
        return progress.has_arrived(run, 0.01)

    assert arrived(5.0, 0.1, 0.001)  # few params, and at the maximum
    assert arrived(0.1, 0.1, np.nan) and arrived(-1.0, 0.1, np.nan)
    assert not arrived(0.2, 0.1, np.nan)
    assert not arrived(0.0, 0.1, 0.5)  # a slow optimiser
    assert not arrived(np.nan, 0.1, np.nan)


def test_the_first_steps_at_the_posterior_do_not_go_too_far():
    """Counts whose covariates are correlated: the params have arrived with the temperature."""
    epil = load_epil()
    base, age = np.log(epil.base / 4), np.log(epil.age)
    last = epil.period == 3
    columns = np.ones(236), base, epil.treated, age - age.mean(), last, base * epil.treated

    def model(x, subject, y):
        beta = numpyro.param("beta", jnp.zeros(x.shape[1]))
        sd = numpyro.param("sd", 1.0, constraint=constraints.positive)
        with numpyro.plate("subjects", 59):
            u = numpyro.sample("u", dist.Normal(0.0, sd))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta + u[subject])), obs=y)

    jala = JALAEM(model)
    run(jala, np.stack(columns, 1), epil.subject, epil.seizures)
    assert jala._run.infos(EM_STEP).newton_decrement.max() < 1.0
    assert jala.diagnostics()["num_steps"] == 10


def test_only_draws_of_many_small_components_cover_a_rest():
    small, large = partition(np.repeat(np.arange(50), 2)), partition(np.repeat([0, 1], 5))
    assert [progress._share_of_draws(each) for each in (joint(3), large, small)] == [1] * 3
    assert progress._share_of_draws(partition(np.arange(10_000))) == pytest.approx(25)
