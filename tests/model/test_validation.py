"""Bad input gets a sentence."""

import importlib.util
import warnings
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal
from numpyro.infer.reparam import LocScaleReparam, NeuTraReparam
from scipy.stats import norm

from numpyro_jala import JALAEM
from numpyro_jala.inference import loop
from numpyro_jala.model import validation
from numpyro_jala.model.arguments import check_integers
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from numpyro_jala.results.edges import edge_warnings
from tests.tools import SCHOOLS, normal_means


def refuse(model, match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        JALAEM(model).run(random.key(0), 1, *args, progress_bar=False, **kwargs)


def test_no_latent_site():
    def model(y):
        mu = numpyro.param("mu", 0.0)
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    refuse(model, "no latent sample site.*'mu', 'y'.*add one on which nothing", SCHOOLS)


def test_no_observed_site():
    refuse(normal_means, "no observed site and no factor.*Did you pass the data")


def test_improper_prior():
    def model(y):
        x = numpyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, "'x' has an improper prior", SCHOOLS)


def discrete(fn):
    def model(y):
        k = numpyro.sample("k", fn)
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(k + x, 1), obs=y)

    return model


def test_discrete_latents_take_funsor(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = discrete(dist.Bernoulli(0.3))
    refuse(model, r"'k' is BernoulliProbs.*numpyro_jala\[enum\]", SCHOOLS)


def test_a_discrete_latent_without_end():
    refuse(discrete(dist.Poisson(2.0)), "'k' is Poisson, which is discrete and", SCHOOLS)


def test_nothing_but_discrete_latents():
    def model(y):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)

    refuse(model, r"All latent sites are discrete \(\['k'\]\)", SCHOOLS)


def test_delta_latent():
    def model(y):
        x = numpyro.sample("x", dist.Delta(1.0))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, "'x' is a Delta", SCHOOLS)


def test_param_in_the_body_of_a_scan():
    def model(y):
        def move(x, seen):
            x = numpyro.sample("x", dist.Normal(x + numpyro.param("drift", 0.0), 1))
            numpyro.sample("y", dist.Normal(x, 1), obs=seen)
            return x, None

        scan(move, 0.0, y)

    refuse(model, "Param 'drift' stands in the body of a scan", SCHOOLS)


def test_param_in_a_branch():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        shift = cond(x > 0, *[lambda _: numpyro.param("up", 1.0)] * 2, None)
        numpyro.sample("y", dist.Normal(x + shift, 1), obs=y)

    refuse(model, "Param 'up' stands in the body of a scan or cond", SCHOOLS)


def around_the_latent(handler):
    def model(y):
        with handler:
            x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    return model


def test_masked_latent():
    model = around_the_latent(handlers.mask(mask=False))
    refuse(model, "'x' is masked, which takes its prior away", SCHOOLS)


def test_neutra():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, optax.adam(0.1), Trace_ELBO())
    params = svi.run(random.key(0), 3, SCHOOLS, progress_bar=False).params
    moved = NeuTraReparam(guide, params).reparam(model)
    refuse(moved, "'auto_shared_latent' is masked", SCHOOLS)


def test_scaled_latent():
    model = around_the_latent(handlers.scale(scale=2.0))
    refuse(model, "'x' is scaled by 2.0", SCHOOLS)


def test_mutable_state():
    def model(y):
        numpyro.primitives.mutable("count", {"value": 0})
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, "'count' is a mutable state", SCHOOLS)


def test_branching_on_a_latent():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x if x > 0 else -x, 1), obs=y)

    refuse(model, "asks for the value of a latent or a param, after site 'x'", SCHOOLS)


def test_a_support_without_a_map_to_the_real_line():
    def model(y):
        x = numpyro.sample("x", dist.ProjectedNormal(jnp.array([1.0, 2.0])))
        numpyro.sample("y", dist.Normal(x[0], 1), obs=y)

    refuse(model, r"'x' \(ProjectedNormal\) has support.*reparam", SCHOOLS)


@pytest.mark.parametrize(
    ("value", "constraint", "match"),
    [
        (-1.0, constraints.positive, r"'theta' starts at -1.0, outside"),
        (0.0, constraints.nonnegative, r"'theta' starts at 0.0, outside or at the edge"),
        (np.nan, constraints.real, r"'theta' starts at nan"),
        (jnp.ones(2), constraints.sphere, r"'theta' has the constraint .*phere"),
    ],
)
def test_params_that_cannot_start(value, constraint, match):
    def model(y):
        theta = numpyro.param("theta", value, constraint=constraint)
        x = numpyro.sample("x", dist.Normal(jnp.nan_to_num(jnp.sum(theta)), 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, match, SCHOOLS)


def test_a_model_that_fails():
    refuse(normal_means, "given arguments before anything else, failed: TypeError", 1, 2, 3)

    def model(y):
        x = numpyro.sample("x", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    words = r"'y' has shape \(4,\), and its distribution \(3,\). Are there as many data"
    refuse(model, words, SCHOOLS[:4])


def test_a_guide_does_not_see_what_is_masked():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        mask = np.array([True, False] * 3)
        numpyro.sample("y", dist.Normal(x, 1).expand([6]), obs=y, obs_mask=mask)

    jala = JALAEM(model, reference=AutoDiagonalNormal(model))
    with pytest.raises(ValueError, match="has masked latents, which a guide"):
        jala.run(random.key(0), 1, SCHOOLS, progress_bar=False)


def test_what_changes_the_meaning_of_the_numbers_is_said():
    def model(y):
        count = numpyro.param("count", 2)
        numpyro.sample("wide", dist.Normal(jnp.zeros((2, 1)), 1.0), obs=y[:2])
        with handlers.reparam(config={"x": LocScaleReparam()}):
            x = numpyro.sample("x", dist.Normal(0.5, 2.0))
        kept = random.bernoulli(numpyro.prng_key(), 0.5, (6,))
        with handlers.scale(scale=3.0):
            numpyro.sample("y", dist.Normal(count * x * kept, 1.0), obs=y)

    jala = JALAEM(model, num_particles=32, num_islands=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(0), 3, SCHOOLS, progress_bar=False)
    said = " ".join(str(warning.message) for warning in caught)
    for text in (
        "'count' is an integer and has no gradient: it stays at 2",
        "'x_centered' belongs to a LocScaleReparam that learns",
        "'y' is scaled by 3.0",
        r"'wide' has shape (2,) and its distribution (2, 1): together (2, 2)",
        "asks for random numbers beside its sites",
    ):
        assert text in said
    assert set(jala.params) == {"x_centered"} and np.isfinite(jala.log_evidence)


def test_subsampled_plate():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1))
        with numpyro.plate("rows", 6, subsample_size=2) as index:
            numpyro.sample("y", dist.Normal(x, 1), obs=y[index])

    refuse(model, "'rows' subsamples 2 of 6", SCHOOLS)


def test_nan_in_the_data():
    bad = SCHOOLS.copy()
    bad[2] = np.nan
    refuse(normal_means, r"'y' holds 1 NaN, the first at index \(2,\)", bad)


def test_unknown_init_params():
    refuse(
        normal_means, r"init_params names \['sigma'\]", SCHOOLS, init_params={"sigma": 1.0}
    )


def test_init_params_outside_their_constraint():
    refuse(
        normal_means,
        r"init_params\['tau'\] = -1.0 lies",
        SCHOOLS,
        init_params={"tau": -1.0},
    )


def test_non_finite_start():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Uniform(x, x + 1), obs=y)

    with pytest.warns(UserWarning, match="Out-of-support"):
        refuse(model, "No particle has a finite.*Site 'y'", jnp.array([-90.0, 90.0]))


def test_particles_of_other_names_or_sizes():
    jala = JALAEM(normal_means, num_particles=16, num_islands=4)
    for given, match in (
        ({"z": np.zeros(16)}, "names"),
        ({"x": np.zeros((3, 6))}, "shape"),
    ):
        with pytest.raises(ValueError, match=match):
            jala.run(random.key(0), 1, SCHOOLS, init_particles=given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(num_particles=100), "not a multiple.*num_particles=96"),
        (dict(num_islands=1), "asks for adaptation"),
        (dict(num_islands=1, step_size=0.1), "preconditioner='auto' asks for adaptation"),
        (dict(step_size=-1.0), "not positive"),
        (dict(preconditioner="full"), "not one of"),
        (dict(resampling="best"), "not one of"),
        (dict(ess_threshold=2.0), "between 0"),
        (dict(annealing_effort=0.5), "annealing_effort=0.5 is not a number of at least 1"),
        (dict(num_particles=24), "islands of 3.*at least 32"),
    ],
)
def test_options(options, match):
    with pytest.raises(ValueError, match=match):
        JALAEM(normal_means, **options)


def test_annealing_needs_other_islands():
    jala = JALAEM(normal_means, num_islands=1, step_size=0.1, preconditioner=None)
    with pytest.raises(ValueError, match="Give init_particles"):
        jala.run(random.key(0), 1, SCHOOLS)


def test_a_result_before_a_run():
    with pytest.raises(ValueError, match="Call run first"):
        JALAEM(normal_means).log_evidence  # noqa: B018
    with pytest.raises(ValueError, match="reference="):
        JALAEM(normal_means, reference="posterior").run(random.key(0), 1, SCHOOLS)


def test_two_draws_that_are_the_same_by_chance_are_no_heap():
    draws = np.linspace(-1.0, 1.0, 2 * 32).reshape(32, 2)
    columns = {"x": np.array([0]), "y": np.array([1])}
    draws[5, 0] = draws[4, 0]
    assert validation.find_tied_draws(draws, columns) == {}
    draws[6, 0] = draws[4, 0]
    assert validation.find_tied_draws(draws, columns) == {"x": pytest.approx(2 / 31)}


def tails():
    """Twenty sizes and two chances of zero with steep powers there, and others without."""
    with numpyro.plate("groups", 20):
        numpyro.sample("size", dist.Gamma(0.08, 1.0))
    numpyro.sample("chance", dist.Beta(0.05, jnp.ones(2)).to_event(1))
    numpyro.sample("mean", dist.Normal())
    numpyro.sample("late", dist.Uniform(1.0, 2.0))
    numpyro.sample("y", dist.Normal(), obs=0.3)


def test_what_lies_below_the_smallest_number_is_told_from_the_tail_above_it():
    trace = run_once(tails, random.key(0), (), {})
    layout = lay_out(tails, trace, (), {})
    columns, rng = layout.columns(), np.random.default_rng(0)
    edge = np.log(np.finfo(np.float32).tiny)
    position = rng.normal(size=(4_000, layout.dim)).astype(np.float32)
    assert validation.find_lost(trace, layout, position) == {}
    position[:, columns["mean"]] = position[:, columns["late"]] = edge
    for name, power in (("size", 0.08), ("chance", 0.05)):  # as close to zero as they get
        where = columns[name]
        drawn = np.log(rng.uniform(size=(4_000, where.size))) / power
        position[:, where] = np.maximum(drawn, 0.99 * edge)
    found = validation.find_lost(trace, layout, position)
    exact = {"size": 20 * np.exp(0.08 * edge), "chance": 2 * np.exp(0.05 * edge)}
    exact["late"] = 1.0  # all that is next to one is one
    assert found == pytest.approx(exact, rel=0.15)


def test_what_is_lost_at_an_edge_is_said_if_it_shows():
    bridge = SimpleNamespace(standard_error=0.1)
    run = SimpleNamespace(
        tied_draws={},
        lost={"size": 0.2, "chance": 0.01},
        result=SimpleNamespace(bridge=bridge),
    )
    (said,) = edge_warnings(run)
    assert "'size' reaches nearer to the edge" in said and "0.2 nats" in said


def shares_and_sizes():
    """Three simplices, a probability, and two sites that are exact everywhere."""
    with numpyro.plate("groups", 3):
        numpyro.sample("shares", dist.Dirichlet(jnp.array([0.3, 1.0, 4.0, 0.1])))
    numpyro.sample("chance", dist.Beta(0.2, 0.3))
    numpyro.sample("size", dist.Gamma(0.1))
    numpyro.sample("mean", dist.Normal())
    numpyro.sample("y", dist.Normal(), obs=0.3)


def test_particles_that_cannot_be_told_from_the_edge_are_found():
    trace = run_once(shares_and_sizes, random.key(0), (), {})
    layout = lay_out(shares_and_sizes, trace, (), {})
    rng = np.random.default_rng(0)
    position = rng.normal(-1.0, 2.0, (200, layout.dim)).astype(np.float32)
    assert validation.find_lost(trace, layout, position) == {}
    columns = layout.columns()
    position[:10, columns["shares"][5]] = 18.0  # 1 - 1.5e-8 is one in single precision
    position[:20, columns["chance"]] = 25.0
    position[20:40, columns["chance"]] = -25.0  # but 1e-11 is not zero
    position[:, columns["size"]] = -40.0
    position[:, columns["mean"]] = 1e6
    position[3:7, columns["shares"][8]] = 18.0
    found = validation.find_lost(trace, layout, position)
    assert found == {"chance": pytest.approx(0.1), "shares": pytest.approx(0.07)}


def test_integers_that_would_wrap_around_are_refused():
    late = 1_700_000_000_000 + np.arange(3)
    early = np.arange(3)

    def model(time, y, *, other=None):
        x = numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(x + time, 1.0), obs=y)

    words = "Argument 0 of the model holds the integer 1700000000002, which is beyond int32"
    refuse(model, words, late, np.zeros(3))
    with pytest.raises(
        ValueError, match="Argument 'other' of the model holds the integer -5"
    ):
        JALAEM(model).run(
            random.key(0), 0, early, np.zeros(3), other={"a": np.array([1, -5_000_000_000])}
        )
    others = np.array(["a", "b"]), random.key(0), jnp.arange(3)
    check_integers((early, 1.5 * late, np.zeros(0, int), *others), {})


@pytest.mark.parametrize("num_steps", [-1, 2.5])
def test_a_number_of_steps_that_is_none(num_steps):
    with pytest.raises(ValueError, match=f"num_steps={num_steps} is not a number of steps"):
        JALAEM(normal_means).run(random.key(0), num_steps, SCHOOLS)


def test_a_failure_names_the_site_and_the_draw():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(0.0, -jnp.abs(x), validate_args=True), obs=y)

    words = r"got invalid scale.*after site 'x', at the draws x = -?\d"
    refuse(model, words, SCHOOLS)


def autoregression(y, data):
    """A scan that looks its data up by a traced index."""
    slope = numpyro.sample("slope", dist.Normal())

    def step(last, _):
        now = numpyro.sample("y", dist.Normal(slope * last, 1.0))
        return now, None

    with handlers.condition(data={"y": data if y is None else y}):
        scan(step, 0.0, jnp.arange(5))


def test_numpy_data_may_be_looked_up_in_a_scan():
    y = np.array([0.3, -1.0, 0.8, 0.2, 1.5], np.float32)
    fixed, arrays, _ = JALAEM(autoregression)._inspect(random.key(0), (y, None), {})
    at = fixed.layout.init_params, jnp.ones(()), jnp.array([0.4])
    by_hand = norm.logpdf(0.4) + norm(0.4 * np.append(0, y[:-1]), 1).logpdf(y).sum()
    np.testing.assert_allclose(-fixed.layout.joint(arrays)(*at), by_hand, rtol=1e-5)


def test_numpy_data_around_a_scan_are_named():
    data = np.ones(5, np.float32)
    words = r"failed: in the body of a scan.*jnp.asarray\(data\).*after site 'slope'"
    refuse(lambda: autoregression(None, data), words)


def positive_with_gaps(y, mask, around):
    x = numpyro.sample("x", dist.Normal(0.0, 0.5))
    fn = dist.LogNormal(x, 1.0).expand([6])
    with handlers.mask(mask=mask if around else True):
        numpyro.sample("unused", fn if around else fn.mask(mask))
    numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("splits", [False, True])
def test_what_a_mask_leaves_out_has_no_jacobian(splits, around):
    """Latents on a half-line that no density holds are held, and count for nothing."""
    gaps = np.array([True, False, True, False, False, True])
    known = {"y": SCHOOLS, "mask": gaps, "around": around}
    trace = run_once(positive_with_gaps, random.key(0), (), known)
    layout = lay_out(positive_with_gaps, trace, (), known, splits=splits)
    assert layout.dim == 4
    at = np.array([0.3, -0.2, 0.5, 0.1], np.float32)  # three logarithms, and x
    found = layout.joint([])(layout.init_params, jnp.ones(()), at)
    exact = norm(0.1, 1).logpdf(at[:3]).sum() + norm(0, 0.5).logpdf(0.1)
    exact += norm(0.1, 1).logpdf(SCHOOLS).sum()
    np.testing.assert_allclose(-found, exact, rtol=1e-5)
    terms = layout.terms([])(layout.init_params, at)
    total = sum(jnp.sum(each) for each in [*terms.prior, *terms.data])
    np.testing.assert_allclose(total, exact, rtol=1e-5)


def test_a_masked_latent_on_a_half_line():
    def model(y):
        x = numpyro.sample("x", dist.HalfNormal(1.0).mask(False))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    refuse(model, "'x' is masked, which takes its prior away", SCHOOLS)


def test_a_refusal_comes_before_the_programs_of_a_run(monkeypatch):
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Uniform(x, x + 1), obs=y)

    def begin(*args):
        raise AssertionError("compiles")

    monkeypatch.setattr(loop, "begin", begin)
    with pytest.warns(UserWarning, match="Out-of-support"):
        refuse(model, "No particle has a finite.*Site 'y'", jnp.array([-90.0, 90.0]))


def counted_from_one(group, y):
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0.0, spread))
    numpyro.sample("y", dist.Normal(u[group], 1.0), obs=y)


def test_an_index_beyond_the_groups_is_told():
    y = jnp.array([0.2, 1.0, -0.4, 0.3])
    group = jnp.array([1, 2, 3, 3])
    trace = run_once(counted_from_one, random.key(0), (group, y), {})
    told = r"reads at the index 3 \(row 2 of 4\) where there are 3 values"
    for splits in (True, False):
        with pytest.warns(UserWarning, match=told):
            lay_out(counted_from_one, trace, (group, y), {}, splits=splits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lay_out(counted_from_one, trace, (group - 1, y), {}, splits=True)
        lay_out(
            counted_from_one, trace, (group - 4, y), {}, splits=True
        )  # from the end, as in Python


def regression(x, y, family=dist.Normal):
    slope = numpyro.sample("slope", dist.Normal())
    numpyro.sample("y", family(jnp.exp(slope * x)), obs=y)


def with_bad_row(value):
    y = np.arange(1.0, 7.0)
    y[4] = value
    return y


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (
            np.ones(6),
            with_bad_row(-2.0),
            r"'y' has log-density -inf at the index \(4,\), at ",
        ),
        (np.ones(6), with_bad_row(-2.0), "at its value -2.0 under the starting"),
        (with_bad_row(np.nan), np.ones(6), r"Argument 0 holds nan at the index \(4,\)"),
        (
            jnp.array([1.0, jnp.nan]),
            np.ones(2),
            r"Argument 0 holds nan at the index \(1,\)",
        ),
        (np.ones(6), np.ones(4), r"'y' has shape \(4,\), and its distribution \(6,\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:Out-of-support values")  # NumPyro's own word
def test_a_bad_row_is_named(x, y, words):
    with pytest.raises(ValueError, match=words):
        JALAEM(regression).run(random.key(0), 0, x, y, family=dist.Poisson)
