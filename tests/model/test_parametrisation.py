"""Latents with a latent scale move in units of it, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoNormal
from scipy.special import logsumexp

from numpyro_jala import JALAEM
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once


def every_kind():
    """Priors whose scale is a latent (all of `SCALED`), a param or a number."""
    width = numpyro.param("width", 1.5, constraint=constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0.3, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    root = numpyro.sample("root", dist.LKJCholesky(3, 2.0))
    with numpyro.plate("group", 4):
        u = numpyro.sample("u", dist.Normal(mu, tau))
        numpyro.sample("by_param", dist.Normal(mu, width))
        student = numpyro.sample("student", dist.StudentT(3.0, u, tau))
        place = jnp.array([1.0, 2.0, 0.0]) + mu
        numpyro.sample("vector", dist.MultivariateNormal(place, scale_tril=tau * root))
        numpyro.sample("positive", dist.LogNormal(mu, tau))
    numpyro.sample("matrix", dist.Laplace(0.0, tau).expand([2, 3]).to_event(1))
    numpyro.sample("walk", dist.GaussianRandomWalk(tau, 5))
    numpyro.sample("walk_by_number", dist.GaussianRandomWalk(0.5, 3))

    def step(last, name, scale):
        return numpyro.sample(name, dist.Normal(0.5 * last, scale)), None

    scan(lambda x, _: step(x, "chain", tau), 0.0, None, length=6)
    scan(lambda x, _: step(x, "chain_by_param", width), 0.0, None, length=6)
    numpyro.deterministic("sum", u + mu)
    numpyro.sample("y", dist.Normal(u + student, 1.0), obs=jnp.arange(4.0))


def half_masked():
    """A mask takes half of the latents out of the density."""
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    seen = jnp.array([True, False])
    numpyro.sample("u", dist.Normal(jnp.zeros(2), tau).mask(seen))


SCALED = ("chain", "matrix", "positive", "student", "u", "vector", "walk")


def layouts(model):
    trace = run_once(model, random.key(1), (), {})
    return [lay_out(model, trace, (), {}, scales=scales) for scales in (True, False)]


@pytest.fixture(scope="module")
def pair():
    return layouts(every_kind)


def test_latents_with_a_latent_scale_are_found(pair):
    scaled, plain = pair
    assert scaled.scaled == SCALED
    assert plain.scaled == ()


def test_a_mask_leaves_latents_as_they_are():
    assert layouts(half_masked)[0].scaled == ()


def test_a_draw_from_the_prior_has_the_same_values(pair):
    drawn = []
    for layout in pair:
        params = layout.init_params
        position = draw_prior(layout, random.key(5), params)
        constrain = jax.jit(lambda *at, layout=layout: layout.constrain(*at, []))
        drawn.append(constrain(random.key(0), params, position))
    assert drawn[0].keys() == drawn[1].keys()
    for name, values in drawn[0].items():
        np.testing.assert_allclose(values, drawn[1][name], rtol=1e-5, atol=1e-6)


def draw_prior(layout, *at):
    return jax.jit(lambda *at: layout.draw_prior(*at, []))(*at)


def test_potentials_differ_by_the_change_of_volume(pair):
    scaled, plain = pair
    params = scaled.init_params
    position = draw_prior(scaled, random.key(7), params)

    @jax.jit
    def to_plain(standard):
        values = scaled.constrain(random.key(0), params, standard, [])
        return plain.unconstrain(params, {n: values[n] for n in scaled.latents}, [])

    jacobian = np.asarray(jax.jit(jax.jacfwd(to_plain))(position), np.float64)
    before, after = (jax.jit(layout.joint([])) for layout in (plain, scaled))
    for temperature in (0.0, 0.3, 1.0):
        at = jnp.asarray(temperature)
        expected = before(params, at, to_plain(position))
        expected -= np.linalg.slogdet(jacobian)[1]
        np.testing.assert_allclose(after(params, at, position), expected, rtol=2e-6)


def test_terms_add_up_to_the_potential(pair):
    scaled = pair[0]
    position = draw_prior(scaled, random.key(7), scaled.init_params)
    terms = jax.jit(scaled.terms([]))(scaled.init_params, position)
    found = -sum(np.sum(each) for part in terms for each in part)
    expected = jax.jit(scaled.joint([]))(scaled.init_params, jnp.asarray(1.0), position)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def three_effects(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    u = numpyro.sample("u", dist.Normal(0.0, tau).expand([3]))
    numpyro.sample("y", dist.Normal(u, 1.0), obs=y)


def test_a_state_of_other_coordinates_is_refused():
    """A guide is Gaussian in the model's own coordinates, and the particles with it."""
    y = np.array([0.5, 2.0, -1.0], np.float32)
    jala = JALAEM(three_effects)
    jala.run(random.key(0), 0, y, progress_bar=False)
    assert int(jala.last_state.num_scaled) == 1
    guided = JALAEM(three_effects, reference=AutoNormal(three_effects))
    with pytest.raises(ValueError, match="in units of a latent scale"):
        guided.run(random.key(0), 0, y, init_state=jala.last_state, progress_bar=False)


GROUPS, ROWS = 60, 2


def effects(y):
    """Effects around a latent mean with a latent scale: a funnel."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("group", GROUPS):
        u = numpyro.sample("u", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(u[:, None], 1.0).to_event(1), obs=y)


def effects_log_evidence(y):
    """The effects and the mean in closed form, the scale on a grid."""
    tau = (np.arange(6_000) + 0.5)[:, None] / 1_000
    mean = y.mean(1).astype(float)
    variance = tau**2 + 1 / ROWS
    precision = GROUPS / variance + 1 / 25
    found = 0.5 * (mean.sum() / variance) ** 2 / precision - 0.5 * np.log(25 * precision)
    found -= 0.5 * (mean**2).sum() / variance + 0.5 * GROUPS * np.log(variance)
    found -= 0.5 * ((y - mean[:, None]) ** 2).sum() + 0.5 * GROUPS * np.log(ROWS)
    found -= 0.5 * GROUPS * ROWS * np.log(2 * np.pi)
    prior = np.log(2) - 0.5 * np.log(2 * np.pi) - 0.5 * tau**2
    return logsumexp(found + prior) - np.log(1_000)


def test_a_funnel_of_sixty_effects():
    """As the model has it this was 1 to 9 nats low; in units of the scale it is right."""
    rng = np.random.default_rng(4)
    y = 1 + 0.5 * rng.normal(size=(GROUPS, 1)) + rng.normal(size=(GROUPS, ROWS))
    y = y.astype(np.float32)
    jala = JALAEM(effects)
    errors, bars = [], []
    for seed in range(3):
        idata = jala.run(random.key(seed), 0, y, progress_bar=False)
        errors.append(jala.log_evidence - effects_log_evidence(y))
        bars.append(jala.log_evidence_se)
    assert max(bars) < 0.1
    assert np.abs(np.divide(errors, bars)).max() < 4
    # Values of the latents, not their coordinates: their mean is that of the data.
    assert abs(float(idata.posterior["u"].mean()) - y.mean()) < 0.1
