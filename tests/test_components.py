"""Latents that are independent given the params have weights of their own."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.funsor import config_enumerate
from numpyro.distributions import constraints
from scipy.optimize import minimize
from scipy.stats import norm

from numpyro_jala import JALAEM
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import loop, programs
from tests.tools import regression, regression_data

NUM_GROUPS, NUM_ROWS, NUM_STEPS = 30, 600, 30
#: Rows by group: as many in each, or none, one, and up to five hundred.
EVEN = np.full(NUM_GROUPS, 20)
UNEVEN = np.array([0, 1, 1, 1, 2, 500, 6, 4, 8, 5, *[0, 1, 2, 3, 4, 5, 6, 7, 8] * 2, 0, 0])
UNEVEN[-1] = NUM_ROWS - UNEVEN[:-1].sum()


def intercepts(group, y=None):
    """A normal intercept for each group."""
    centre = numpyro.param("centre", 0.0)
    tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
    sigma = numpyro.param("sigma", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Normal(centre + u[group], sigma), obs=y)


def data(sizes, seed=0):
    """Draw data with the rows of the groups in random order."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(NUM_GROUPS), sizes))
    u = 0.8 * rng.normal(size=NUM_GROUPS)
    y = 1.0 + u[group] + 1.3 * rng.normal(size=group.size)
    return group, y.astype(np.float32)


def moments(group, residual, tau, sigma):
    """Return the mean and the variance of each intercept given the data."""
    count = np.bincount(group, minlength=NUM_GROUPS)
    total = np.bincount(group, residual, minlength=NUM_GROUPS)
    variance = 1 / (1 / tau**2 + count / sigma**2)
    return variance * total / sigma**2, variance


def exact(group, y, centre, tau, sigma):
    """Return the log-likelihood of the params, the intercepts integrated out."""
    residual = np.asarray(y, float) - centre
    mean, variance = moments(group, residual, tau, sigma)
    seen = -0.5 * np.sum(residual**2) / sigma**2 - y.size * np.log(sigma)
    integrals = 0.5 * np.sum(mean**2 / variance + np.log(variance / tau**2))
    return seen - 0.5 * y.size * np.log(2 * np.pi) + integrals


def maximum(group, y):
    def short(z):
        return -exact(group, y, z[0], *np.exp(z[1:]))

    options = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000}
    return -minimize(short, np.zeros(3), method="Nelder-Mead", options=options).fun


def fit(jala, sizes, seed=0, **options):
    found = data(sizes)
    jala.run(random.key(seed), NUM_STEPS, *found, progress_bar=False, **options)
    return found


def scaled_error(jala, group, y):
    params = {name: float(value) for name, value in jala.params.items()}
    return (jala.log_evidence - exact(group, y, **params)) / jala.log_evidence_se


def assert_exact(jala, group, y):
    """Assert that the estimate is the maximum, and the log-evidence that at the estimate."""
    params = {name: float(value) for name, value in jala.params.items()}
    assert maximum(group, y) - exact(group, y, **params) < 0.01
    assert 0 < jala.log_evidence_se < 0.1
    assert abs(scaled_error(jala, group, y)) < 4


@pytest.fixture(scope="module")
def auto():
    return JALAEM(intercepts)


def test_components_agree_with_the_exact_likelihood_and_so_does_one_weight(auto):
    joint = JALAEM(intercepts, components="joint")
    for jala, count in ((auto, NUM_GROUPS), (joint, 1)):
        assert_exact(jala, *fit(jala, EVEN))
        assert jala.components["num_components"] == count


def test_the_reported_error_of_the_evidence_is_its_error(auto):
    scores = [scaled_error(auto, *fit(auto, EVEN, seed)) for seed in range(1, 9)]
    assert abs(np.mean(scores)) < 4 / np.sqrt(8)
    assert 0.3 < np.std(scores, ddof=1) < 2


def test_draws_of_a_small_component_are_independent_of_each_other_and_of_the_rest(auto):
    group, y = fit(auto, EVEN)
    params = {name: float(value) for name, value in auto.params.items()}
    centre = params.pop("centre")
    mean, variance = moments(group, y.astype(float) - centre, **params)
    draws = np.asarray(auto.get_weighted_samples()[0]["u"], float)
    size, scaled = len(draws), (draws - mean) / np.sqrt(variance)
    assert all(len(np.unique(column)) > 0.95 * size for column in draws.T)
    assert (np.abs(scaled.mean(0)) < 4 / size**0.5).all()
    assert (np.abs(scaled.var(0) - 1) < 4.5 * (2 / size) ** 0.5).all()
    # The largest of 435 correlations.
    apart = np.corrcoef(scaled.T)[np.triu_indices(NUM_GROUPS, 1)]
    assert np.abs(apart).max() < 4.9 / size**0.5


def test_other_groups_of_as_many_rows_have_components_of_their_own(auto, compilations):
    """Some of them have no row, one has a single row, and one has five hundred."""
    assert sorted(set(UNEVEN))[:2] == [0, 1] and UNEVEN.max() == 500
    for sizes in (EVEN, UNEVEN):
        group, y = fit(auto, sizes)
        assert_exact(auto, group, y)
        centre, tau, sigma = (
            float(auto.params[name]) for name in ("centre", "tau", "sigma")
        )
        mean, variance = moments(group, y.astype(float) - centre, tau, sigma)
        samples, log_weight = auto.get_weighted_samples()
        np.testing.assert_allclose(np.exp(log_weight).sum(), 1, rtol=1e-5)
        found = np.exp(log_weight) @ samples["u"]
        tolerance = 5 * np.sqrt(2 * variance / auto.num_particles)
        assert (np.abs(found - mean) < tolerance).all()
        spread = np.exp(log_weight) @ (samples["u"] - found) ** 2
        np.testing.assert_allclose(spread, variance, rtol=5 * np.sqrt(4 / len(log_weight)))
    compilations.clear()
    for sizes in (EVEN, UNEVEN):  # both are known
        fit(auto, sizes, seed=3)
    assert not compilations


def frontier(x, y):
    """Output below what would be possible, by an inefficiency that is never negative."""
    slope = numpyro.param("slope", jnp.zeros(2))
    loss = numpyro.param("loss", 1.0, constraint=constraints.positive)
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    with numpyro.plate("firm", len(y)):
        u = numpyro.sample("u", dist.HalfNormal(loss))
        numpyro.sample("y", dist.Normal(x @ slope - u, noise), obs=y)


def frontier_log_likelihood(x, y, slope, loss, noise):
    """Of a Normal less a half Normal (Aigner, Lovell and Schmidt 1977)."""
    error, scale = y - x @ slope, np.hypot(loss, noise)
    skewed = norm.logcdf(-error * loss / noise / scale)
    return np.sum(np.log(2) + norm.logpdf(error, scale=scale) + skewed)


@pytest.mark.parametrize("seed", [0, 1])
def test_eight_particles_of_an_island_lead_to_the_maximum(seed):
    """A score that is biased by a tenth leads to no loss at all, nats below the maximum."""
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(200), rng.normal(size=200)], 1)
    lost = np.abs(rng.normal(size=200))
    y = x @ [1.0, 0.5] - lost + 0.5 * rng.normal(size=200)
    x, y = np.float32(x), np.float32(y)
    jala = JALAEM(frontier)
    jala.run(random.key(seed), 60, x, y, progress_bar=False)
    assert jala.num_particles == 64 and jala.components["num_components"] == 200
    x, y = x.astype(float), y.astype(float)

    def short(z):
        return -frontier_log_likelihood(x, y, z[:2], *np.exp(z[2:]))

    options = {"xatol": 1e-6, "fatol": 1e-9, "maxiter": 4000, "maxfev": 8000}
    start = [1.0, 0.5, 0.0, np.log(0.5)]
    best = -minimize(short, start, method="Nelder-Mead", options=options).fun
    params = {name: np.asarray(value, float) for name, value in jala.params.items()}
    here = frontier_log_likelihood(x, y, **params)
    assert best - here < 0.01
    assert abs(jala.log_evidence - here) < 4 * jala.log_evidence_se < 0.2


@pytest.mark.slow
def test_groups_of_one_to_a_thousand_rows_are_integrated_alike():
    jala = JALAEM(intercepts, num_particles=64)
    sizes = np.geomspace(1, 1_000, NUM_GROUPS).astype(int)
    assert_exact(jala, *fit(jala, sizes))
    assert jala.components["num_components"] == NUM_GROUPS


def test_zeros_in_all_groups_are_integrated_and_leave_params_open():
    """The rate falls without end, and no data tell its spread."""

    def model(y):
        centre = numpyro.param("centre", 0.0)
        sd = numpyro.param("sd", 1.0, constraint=constraints.positive)
        with numpyro.plate("groups", NUM_GROUPS):
            u = numpyro.sample("u", dist.Normal(centre, sd))
            with numpyro.plate("rows", 4):
                numpyro.sample("y", dist.Poisson(jnp.exp(u)), obs=y)

    jala, y = JALAEM(model), np.zeros((4, NUM_GROUPS), np.float32)
    with pytest.warns(UserWarning) as said:
        jala.run(random.key(0), NUM_STEPS, y, progress_bar=False)
    texts = [str(each.message) for each in said]
    is_open = ["hardly determine" in text or "not converged" in text for text in texts]
    # The error of a spread that is open may be known roughly, or a little better.
    is_rough = ["standard error of sd" in text for text in texts]
    assert any(is_open) and all(np.logical_or(is_open, is_rough))
    z, width = np.linspace(-8, 8, 401, retstep=True)
    centre, sd = float(jala.params["centre"]), float(jala.params["sd"])
    likelihood = np.exp(-4 * np.exp(centre + sd * z)) @ norm.pdf(z) * width
    error = jala.log_evidence - NUM_GROUPS * np.log(likelihood)
    assert abs(error) < 4 * jala.log_evidence_se < 0.2


def test_a_scale_that_falls_to_zero_is_named(monkeypatch):
    """Of outcomes that are all alike the likelihood grows without end."""

    def model(y):
        centre = numpyro.param("centre", 0.5)
        spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
        noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
        with numpyro.plate("groups", NUM_GROUPS):
            u = numpyro.sample("u", dist.Normal(centre, spread))
            with numpyro.plate("rows", 4):
                numpyro.sample("y", dist.Normal(u, noise), obs=y)

    monkeypatch.setattr(loop, "_MOST_STEPS", 300)
    y = np.full((4, NUM_GROUPS), 1.5, np.float32)
    with pytest.raises(RuntimeError, match=r"the way (spread|noise) fell to \d.*Fix"):
        JALAEM(model).run(random.key(0), 10, y, progress_bar=False)


def test_a_component_with_heavy_tails_is_named_by_its_plate_index():
    def model(y, dof):
        centre = numpyro.param("centre", 0.0)
        with numpyro.plate("groups", NUM_GROUPS):
            u = numpyro.sample("u", dist.Normal(centre, 1.0))
            numpyro.sample("w", dist.StudentT(dof))
            numpyro.sample("y", dist.Normal(u, 1.0), obs=y)

    jala, y = JALAEM(model), np.linspace(-1.0, 2.0, NUM_GROUPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jala.run(random.key(0), 10, y, np.full(NUM_GROUPS, 30.0), progress_bar=False)
    # With less than one degree of freedom no proposal with four covers the tail.
    one_heavy = np.where(np.arange(NUM_GROUPS) == 17, 0.6, 30.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jala.run(random.key(0), 10, y, one_heavy, progress_bar=False)
    assert any("component of w[17] have a heavy tail" in str(w.message) for w in said)


def test_a_missing_value_in_one_group_is_named_by_its_row():
    group, y = data(EVEN)
    y[17] = np.nan
    with pytest.raises(ValueError, match=r"'y' holds 1 NaN, the first at index \(17,\)"):
        describe(intercepts, group, y)


@config_enumerate
def two_kinds(group, y):
    """Rows of two kinds, which are not known, and a normal intercept for each group."""
    share = numpyro.param("share", 0.5, constraint=constraints.unit_interval)
    tau = numpyro.param("tau", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(0.0, tau))
    with numpyro.plate("rows", len(group)):
        kind = numpyro.sample("kind", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(u[group] + 2.0 * kind, 1.0), obs=y)


@pytest.mark.parametrize("model", [intercepts, two_kinds])
def test_a_killed_run_is_resumed_bit_by_bit(model, auto, tmp_path, monkeypatch):
    jala = auto if model is intercepts else JALAEM(model)
    options = {"checkpoint": tmp_path / "run.npz", "checkpoint_every": 10}
    run_steps, ascents = programs.run_steps, []

    def fatal(fixed, given, state, stage, *rest):
        ascents.append(int(stage) == EM_STEP)
        if sum(ascents) == 3:
            raise SystemExit
        return run_steps(fixed, given, state, stage, *rest)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        fatal.lower = run_steps.lower
        patch.setattr(programs, "run_steps", fatal)
        fit(jala, UNEVEN, **options)
    results = []
    for given in (options, {}):
        fit(jala, UNEVEN, **given)
        found = jala.params, jala.log_evidence, jala.get_samples(), jala.standard_errors()
        results.append(jax.tree.leaves(found))
    for resumed, whole in zip(*results, strict=True):
        np.testing.assert_array_equal(resumed, whole)
    assert num_components(jala.last_state) == NUM_GROUPS


def num_components(state):
    return state.target.temperature.shape[1]


def climb(jala, rng_key, group, y, num_steps=NUM_STEPS):
    """Take pure steps on data that are known."""
    state = jala.init(rng_key, group, y)
    update = jax.jit(lambda state: jala.update(state, group, y)[0])
    for _ in range(num_steps):
        state = update(state)
    assert update._cache_size() == 1
    return state


def test_a_pure_fit_is_as_exact_as_a_run(auto):
    group, y = fit(auto, UNEVEN)
    of_run, largest = auto.log_evidence_se, auto.standard_errors()
    at_run = auto.params
    state = climb(auto, random.key(3), group, y)
    found = auto.finish(state, group, y)
    params = {name: float(value) for name, value in found.params.items()}
    here = exact(group, y, **params)
    # A tenth of a standard error is 0.005 nats.
    assert maximum(group, y) - here < 0.005
    for name, value in params.items():
        assert abs(value - at_run[name]) < 0.1 * largest[name]
    assert abs(found.log_evidence - here) < 3 * found.standard_error
    assert found.standard_error < 2 * of_run


def test_runs_and_pure_functions_continue_each_other(auto):
    group, y = data(UNEVEN)
    state = climb(auto, random.key(4), group, y, 3)
    fit(auto, UNEVEN, init_state=state)
    assert_exact(auto, group, y)
    state, info = auto.update(auto.last_state, group, y)
    assert num_components(state) == NUM_GROUPS
    assert 0.5 < info.ess <= 1 and info.died == 0


def test_known_data_are_looked_at_once_and_steps_compiled_once(auto, compilations):
    group, y = data(EVEN)
    state = auto.init(random.key(0), group, y)
    fixed = auto._last
    update = jax.jit(lambda state: auto.update(state, group, y)[0])
    state = update(update(state))
    auto._inspect(random.key(1), (group, y), {})
    assert auto._last is fixed  # also to a run
    compilations.clear()
    for _ in range(3):
        state = update(state)
    assert not compilations


def test_traced_data_leave_the_components_that_hold_whatever_their_values():
    group, y = data(EVEN)
    jala, key = JALAEM(intercepts), random.key(0)
    of_all = jax.eval_shape(jala.init, key, group, y)
    of_y = jax.eval_shape(lambda key, y: jala.init(key, group, y), key, y)
    of_none = jax.eval_shape(lambda key: jala.init(key, group, y), key)
    found = [num_components(state) for state in (of_all, of_y, of_none)]
    assert found == [1, NUM_GROUPS, NUM_GROUPS]
    # One argument has the groups, so that known they would be told.
    with pytest.raises(ValueError, match="30 components. Here .* 1 at least: argument 'gr"):
        jax.eval_shape(jala.update, of_none, group, y)
    with pytest.raises(
        ValueError, match=r"close|Close over the data, as in jax.jit\(lambda"
    ):
        jax.eval_shape(jala.finish, of_none, group, y)
    with pytest.raises(ValueError, match="form 1 component, and those of .* data 30"):
        jax.eval_shape(lambda state: jala.update(state, group, y), of_all)
    with pytest.raises(ValueError, match="form 1 component, and those of .* data 30"):
        jala.run(key, 3, group, y, init_state=of_all, progress_bar=False)
    joint = JALAEM(intercepts, components="joint")
    state = jax.eval_shape(lambda key: joint.init(key, group, y), key)
    assert num_components(jax.eval_shape(joint.update, state, group, y)[0]) == 1


def test_the_argument_that_decides_is_named_where_one_does():
    def slopes(x, rows):
        with numpyro.plate("groups", 4):
            a = numpyro.sample("a", dist.Normal())
        numpyro.sample("y", dist.Normal(a[rows["to"]] * x, 1.0), obs=rows["y"])

    x, rows = np.ones(5, np.float32), {"to": np.arange(5) % 4, "y": np.zeros(5)}
    jala = JALAEM(slopes)
    state = jax.eval_shape(lambda key: jala.init(key, x, rows), random.key(0))
    with pytest.raises(ValueError, match=r"argument 'rows'\['to'\] decides what"):
        jax.eval_shape(jala.update, state, x, rows)
    # In a product either may be zero: no row then says anything of its latent.
    whole = np.arange(20), np.zeros(20, np.float32)
    loose = JALAEM(crossed)
    state = jax.eval_shape(
        lambda key: loose.init(key, np.zeros(20, int), whole[1]), random.key(0)
    )
    with pytest.raises(ValueError, match="argument 'group' decides"):
        jax.eval_shape(loose.update, state, *whole)


def describe(model, *args):
    """Look at a model without compiling anything."""
    jala = JALAEM(model)
    jala._inspect(random.key(0), args, {})
    return jala.components, jala.num_particles


def test_components_name_the_latents_of_each_site():
    group = np.array([0, 0, 2, 1, 2])

    def slopes(x, y):
        with numpyro.plate("groups", 4):
            a = numpyro.sample("a", dist.Normal())
            b = numpyro.sample("b", dist.Normal().expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(a[group] + (b[group] * x).sum(-1), 1.0), obs=y)

    found, _ = describe(slopes, np.ones((5, 2), np.float32), np.zeros(5, np.float32))
    assert set(found) == {"num_components", "sizes", "a", "b"}
    # The last group has no rows, and there is nothing to link its two latent sites.
    assert found["num_components"] == 5
    np.testing.assert_array_equal(found["b"][:, 0], found["b"][:, 1])
    np.testing.assert_array_equal(found["a"][:3], found["b"][:3, 0])
    assert len({*found["a"], *found["b"][:, 0]}) == 5
    sizes = [found["sizes"][i] for i in (*found["a"][:3], found["a"][3], found["b"][3, 0])]
    assert sizes == [3, 3, 3, 1, 2]


def crossed(group, y):
    with numpyro.plate("first", 4):
        a = numpyro.sample("a", dist.Normal())
    with numpyro.plate("second", 5):
        b = numpyro.sample("b", dist.Normal())
    numpyro.sample("y", dist.Normal(a[group % 4] + b[group % 5], 1.0), obs=y)


@pytest.mark.parametrize("model", [regression, crossed])
def test_latents_that_are_all_tied_are_one_component(model):
    many = np.arange(20), np.zeros(20, np.float32)
    found, num_particles = describe(
        model, *(regression_data() if model is regression else many)
    )
    assert found["num_components"] == 1 and num_particles == 512
    assert all(
        (found[name] == 0).all() for name in found.keys() - {"sizes", "num_components"}
    )


def test_what_is_asked_of_an_object_is_about_its_last_data():
    jala = JALAEM(crossed)
    # Of twenty rows all are tied; in the other data the rows say less.
    tied, loose = np.arange(20), np.zeros(20, int)
    y = np.zeros(20, np.float32)
    for group, count in ((tied, 1), (loose, 8), (tied, 1), (loose, 8)):
        jala._inspect(random.key(0), (group, y), {})
        assert jala.components["num_components"] == count


def test_data_of_half_precision_are_told_apart():
    def model(x, y):
        with numpyro.plate("rows", 3):
            z = numpyro.sample("z", dist.Normal())
            numpyro.sample("y", dist.Normal(z * x.astype(float), 1.0), obs=y)

    found, _ = describe(model, jnp.ones(3, jnp.bfloat16), np.zeros(3, np.float32))
    assert found["num_components"] == 3


def test_few_particles_are_enough_for_many_components():
    group = np.repeat(np.arange(NUM_GROUPS), 20)
    found, num_particles = describe(intercepts, group, np.zeros(NUM_ROWS, np.float32))
    assert found["num_components"] == NUM_GROUPS
    assert num_particles < 512 and num_particles % 8 == 0


def test_other_words_for_components_are_refused():
    with pytest.raises(ValueError, match="components='other' is neither 'auto'.*'joint'"):
        JALAEM(intercepts, components="other")
