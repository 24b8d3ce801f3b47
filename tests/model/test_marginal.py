"""Models whose discrete latents are summed out fall into components, as others do."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import norm, poisson

from numpyro_jala import JALAEM, random_effects
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.marginal import is_tempered
from numpyro_jala.model.sites import run_once
from tests import fuzz_enumerated
from tests.model import enumerated
from tests.model.enumerated import MODELS

KEY = random.key(0)


def laid_out(model):
    return lay_out(model, run_once(model, KEY, (), {}), (), {}, splits=True)


def same_sets(found, expected):
    """Tell whether two numberings of latents form the same sets."""
    pairs = np.unique(np.stack([found, expected]), axis=1)
    return len(pairs.T) == len(np.unique(found)) == len(np.unique(expected))


def flat(parts, names):
    return np.concatenate([np.ravel(parts[name]) for name in names])


@pytest.mark.parametrize("name", MODELS)
def test_latents_that_share_a_discrete_one_are_a_component_and_no_others(name):
    model, expected = MODELS[name]
    found = laid_out(model).describe_components()
    assert found.keys() == {"num_components", "sizes", *expected}
    assert same_sets(flat(found, expected), flat(expected, expected))


@pytest.mark.parametrize("name", MODELS)
def test_potentials_add_up_to_that_of_all_latents(name):
    """At both ends, and in between along a geometric path, one component by another path."""
    layout = laid_out(MODELS[name][0])
    params = layout.init_params + 0.1
    whole, parts = layout.joint([]), layout.potential([])
    count = layout.partition.num_components

    @jax.jit
    def both(x):
        ends = [whole(params, jnp.asarray(t), x) for t in (0.0, 1.0)]
        heats = jnp.ones(count) * jnp.array([[0.0], [1.0], [0.3]])
        return jnp.stack(ends), jnp.stack([parts(params, t, x) for t in heats]).sum(1)

    for x in random.normal(random.key(1), (3, layout.dim)):
        (prior, joint), found = both(x)
        np.testing.assert_allclose(found[:2], [prior, joint], rtol=2e-5)
        if count > 1:
            np.testing.assert_allclose(found[2], 0.7 * prior + 0.3 * joint, rtol=2e-5)


def zero_inflated():
    """As ``class_of_each_row``, the sum over classes written out."""
    share = numpyro.param("share", 0.3, constraint=constraints.unit_interval)
    with numpyro.plate("groups", enumerated.GROUPS):
        u = enumerated.effects()
        with numpyro.plate("rows", enumerated.ROWS):
            parts = [dist.Poisson(jnp.exp(u)), dist.Poisson(1e-3)]
            logs = jnp.stack([each.log_prob(enumerated.COUNTS) for each in parts])
            weights = jnp.log(jnp.stack([1 - share, share]))[:, None, None]
            numpyro.factor("y", jax.nn.logsumexp(weights + logs, 0))


def test_each_component_has_the_potential_that_is_written_by_hand():
    ours, theirs = laid_out(enumerated.class_of_each_row), laid_out(zero_inflated)
    params = ours.init_params - 0.4
    for x in random.normal(random.key(2), (3, ours.dim)):
        for heats in ([0.0, 0.0, 0.0, 0.0], [1.0, 0.2, 0.0, 0.7]):
            given = params, jnp.array(heats), x
            found, expected = (each.potential([])(*given) for each in (ours, theirs))
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def table(mask=None):
    """Rows of groups in no order, with a class each; a mask may take some away."""
    with numpyro.plate("groups", 3):
        u = enumerated.effects()
    with numpyro.plate("rows", 7), handlers.mask(mask=mask):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        mean = u[enumerated.GROUP] + 2.0 * z
        numpyro.sample("y", dist.Normal(mean, 0.7), obs=enumerated.SEEN.ravel()[:7])


def test_a_masked_class_is_taken_from_the_component_that_it_is_added_to():
    """Its values count in the prior too: what is left counts them once in one component."""
    mask = np.arange(7) != 4
    layout, x = laid_out(partial(table, mask)), jnp.array([0.4, -1.0, 0.7])
    found = -layout.potential([])(layout.init_params, jnp.ones(3), x)
    rows = np.stack(
        [
            norm.logpdf(enumerated.SEEN.ravel()[:7], x[enumerated.GROUP] + shift, 0.7)
            for shift in (0, 2)
        ]
    )
    rows = logsumexp(rows + np.log([[0.7], [0.3]]), axis=0)
    sums = np.bincount(enumerated.GROUP[mask], rows[mask])
    extra = (found - norm.logpdf(x, 0.4, 1.5) - sums) / np.log(2)
    np.testing.assert_allclose(np.sort(extra), [0, 0, 1], atol=1e-4)


@pytest.mark.parametrize("name", ["chain_of_each_group", "effects_of_rows", "two_in_a_row"])
def test_the_terms_come_in_the_same_order_however_often_the_model_is_traced(name):
    """Their owners are kept: another order would give latents the terms of others."""
    layout = laid_out(MODELS[name][0])
    at = layout.init_params, random.normal(KEY, (layout.dim,))
    first, second = (jax.jit(layout.terms([]))(*at) for _ in range(2))
    with jax.enable_x64(True):
        wide = jax.jit(layout.in_double.terms([]))(*map(np.float64, at))
    for one, *others in zip(*map(jax.tree.leaves, (first, second, wide)), strict=True):
        for other in others:
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "is_observed", "expected"),
    [
        ("y", True, True),
        ("_PREV_y", True, True),
        ("u", False, False),
        ("_u_log_det", True, False),
        ("_PREV__u_log_det", True, False),  # of the first step of a scan
    ],
)
def test_what_is_observed_is_tempered_and_jacobians_are_not(name, is_observed, expected):
    site = {"type": "sample", "name": name, "is_observed": is_observed}
    assert is_tempered(site, {"_u_log_det"}) == expected


def test_models_at_random_have_no_finer_components_than_second_derivatives_say():
    ends = [row["how"] for row in fuzz_enumerated.fuzz(num_models=4, first_seed=1)]
    assert set(ends) <= {"equal", "coarser", "refused"} and ends.count("equal") > 1


NUM_GROUPS, NUM_ROWS = 40, 5


def visits(y):
    """Counts of groups, of which some are zero whatever the group's rate."""
    share = numpyro.param("share", 0.3, constraint=constraints.unit_interval)
    centre = numpyro.param("centre", 0.5)
    sd = numpyro.param("sd", 0.7, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        u = numpyro.sample("u", dist.Normal(centre, sd))
        with numpyro.plate("rows", NUM_ROWS):
            z = numpyro.sample("z", dist.Bernoulli(share))
            numpyro.sample("y", dist.Poisson(jnp.where(z == 1, 1e-4, jnp.exp(u))), obs=y)


def visits_by_quadrature(y, share, centre, sd):
    """Return log-likelihood and posterior mean of each group, and the chance of each class."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    u = centre + sd * nodes
    zero = np.log(share) + poisson.logpmf(y[..., None], 1e-4)
    rows = np.logaddexp(zero, np.log1p(-share) + poisson.logpmf(y[..., None], np.exp(u)))
    logs = rows.sum(0) + np.log(weights / np.sqrt(2 * np.pi))
    found = logsumexp(logs, axis=-1)
    posterior = np.exp(logs - found[:, None])
    chance = (np.exp(zero - rows) * posterior).sum(-1)
    return found, posterior @ u, chance


def test_a_fit_agrees_with_quadrature_in_all_that_it_returns(tmp_path):
    rng = np.random.default_rng(0)
    rate = np.exp(0.8 + 0.9 * rng.normal(size=NUM_GROUPS))
    y = rng.poisson(rate, (NUM_ROWS, NUM_GROUPS)) * (rng.uniform(size=(5, 40)) > 0.25)
    y = y.astype(np.float32)
    jala, kept = JALAEM(visits), tmp_path / "run.npz"
    idata = jala.run(random.key(0), 20, y, progress_bar=False, checkpoint=kept)
    assert jala.components["num_components"] == NUM_GROUPS
    params = {name: float(value) for name, value in jala.params.items()}
    groups, mean, chance = visits_by_quadrature(y, **params)
    assert abs(jala.log_evidence - groups.sum()) < 4 * jala.log_evidence_se < 0.1

    def short(z):
        share, centre, sd = 1 / (1 + np.exp(-z[0])), z[1], np.exp(z[2])
        return -visits_by_quadrature(y, share, centre, sd)[0].sum()

    best = minimize(short, [-1.0, 0.5, 0.0], method="Nelder-Mead", options={"xatol": 1e-5})
    assert -best.fun - groups.sum() < 0.01

    left_out = jala.leave_one_group_out().groups
    by_group = left_out["log_evidence"][[f"u[{i}]" for i in range(NUM_GROUPS)]]
    np.testing.assert_allclose(by_group, groups, atol=0.02)
    effects = random_effects(idata, "u").sort_index()
    size = jala.num_particles
    assert (np.abs(effects["mean"] - mean) < 5 * effects["se"] / np.sqrt(size)).all()
    drawn = jala.get_samples()["z"]
    tolerance = 5 * np.sqrt(chance * (1 - chance) / size) + 0.005
    assert (np.abs(drawn.mean(0) - chance) < tolerance).all()
    seen = jala.predict(random.key(1))["posterior_predictive"]["y"]
    assert seen.shape[-2:] == y.shape

    again = JALAEM(visits)
    again.run(random.key(0), 20, y, progress_bar=False, checkpoint=kept)
    assert again.log_evidence == jala.log_evidence
