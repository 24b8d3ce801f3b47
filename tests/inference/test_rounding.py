"""Rounding of large potentials: taken out of the evidence, or else part of its error."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.stats import nbinom

from numpyro_jala import JALAEM
from numpyro_jala.inference import estimation, evidence, modes, programs, rounding
from numpyro_jala.inference.evidence import Bridge
from numpyro_jala.inference.programs import CLOUDS
from numpyro_jala.inference.record import Ending
from numpyro_jala.inference.snapshots import take
from tests.tools import SCHOOLS, normal_means, normal_means_log_likelihood

#: Single precision has steps of 1/8 there, and takes this for its integer part.
CONSTANT = -(2.0**20 + 0.06)


def test_the_change_is_that_of_the_integral():
    """Against a sum over points of unequal weights, where the change is not small."""
    rng = np.random.default_rng(1)
    log_weight, change = rng.normal(size=(2, 16, 3, 4_000))
    change = 0.3 * change + 0.4 * log_weight + np.array([[2.0], [-50.0], [300.0]])
    found = rounding._compare(log_weight, change)
    # Both are Normal: weights move the mean by the covariance.
    exact = np.array([2.0, -50.0, 300.0]) + 0.4 + 0.5 * (0.3**2 + 0.4**2)
    z = (found.log_evidence - exact) / np.sqrt(found.variance)
    assert (np.abs(z) < 4).all()
    assert (np.sqrt(found.variance) < 0.01).all()


def test_dead_particles_tell_nothing_of_rounding():
    log_weight, change = np.zeros((4, 1, 6)), np.full((4, 1, 6), 0.125)
    change[:, :, 0], log_weight[:, :, 1] = np.inf, -np.inf
    change[:, :, 1] = 7.0
    assert rounding._compare(log_weight, change).log_evidence == 0.125
    log_weight[2] = -np.inf
    assert rounding._compare(log_weight, change) is None


def model(y):
    """Six means, and a million nats."""
    normal_means(y)
    numpyro.factor("constant", CONSTANT)


def scaled_error(jala):
    best = normal_means_log_likelihood(jala.params, SCHOOLS) + CONSTANT
    return (jala.log_evidence - best) / jala.log_evidence_se


@pytest.mark.parametrize("components", ["auto", "joint"])
def test_large_potentials_are_as_exact_as_small(components):
    jala = JALAEM(model, num_particles=256, components=components)
    jala.run(random.key(0), 60, SCHOOLS, progress_bar=False)
    assert abs(scaled_error(jala)) < 4
    assert jala.log_evidence_se < 0.01


#: Single precision has steps of 1/8 at the terms of their densities, which nearly cancel.
COUNTS = np.array([104_321, 98_007, 131_072, 120_901, 90_113, 111_111], np.float32)


def counts(y):
    """Six rates around a mean, as uncertain as those of a hundred events."""
    mean = numpyro.param("mean", 1e5, constraint=dist.constraints.positive)
    with numpyro.plate("group", 6):
        rate = numpyro.sample("rate", dist.Gamma(100.0, 100.0 / mean))
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.parametrize("components", ["auto", "joint"])
def test_small_differences_of_large_terms_are_as_exact_as_small_terms(components):
    jala = JALAEM(counts, num_particles=256, components=components)
    jala.run(random.key(0), None, COUNTS, progress_bar=False)
    chance = 1 / (1 + float(jala.params["mean"]) / 100)
    exact = nbinom(100, chance).logpmf(COUNTS.astype(float)).sum()
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se
    assert jala.log_evidence_se < 0.05


def bridged(fixed, data, state, clouds):
    fitted = estimation.fit_loo(fixed, clouds)
    at = random.key(1), data, state.target.params, clouds
    return evidence.at_level(estimation.bridge_to(fixed, *at, *fitted), 0.0)


def weighed(fixed, data, state, clouds):
    level = estimation.fit_loo(fixed, clouds)[1]
    at = random.key(1), data, state.target.params, clouds, level
    return evidence.at_level(modes.estimate(modes.weigh(fixed, *at)), level[0])


@pytest.mark.parametrize("estimate", [bridged, weighed])
def test_draws_are_rounded_as_the_particles_are(estimate):
    """By a constant of the program that moved these, of which a third are dead."""
    jala = JALAEM(normal_means, num_particles=96, components="joint")
    state = jala.init(random.key(0), SCHOOLS)
    fixed, arrays, _ = jala._inspect(random.key(0), (SCHOOLS,), {})
    data, cloud = programs.Data(arrays), take(state.cloud, fixed.layout.partition)
    cloud = cloud._replace(log_weight=cloud.log_weight.at[:, :, ::3].set(-jnp.inf))
    dead = cloud.potential.at[:, :, ::3].set(1e3)
    found = [
        estimate(fixed, data, state, [cloud._replace(potential=dead + shift)] * CLOUDS)
        for shift in (0.0, 0.75)
    ]
    change = found[0].log_evidence - found[1].log_evidence
    if estimate is bridged:  # whose level is the lowest potential
        change += 0.75
    np.testing.assert_allclose(change, 0.75, atol=2e-4)


def test_a_change_that_some_particles_do_not_see_is_seen(monkeypatch):
    """Of those that are alive."""
    potential = np.full((2, 1, 9), 3, np.float32)
    log_weight = np.where(np.arange(9) == 5, -np.inf, potential)
    change = np.array([0, 0, 0.5, 0, -0.75, 9, np.nan, 0])
    cloud = SimpleNamespace(
        potential=potential, position=np.ones((2, 9, 1)), log_weight=log_weight
    )
    run = SimpleNamespace(data=SimpleNamespace(mode=None), num_evaluations=0)
    monkeypatch.setattr(
        rounding, "_exact", lambda run, params, x: 3 + change[None, None, : x.shape[1]]
    )
    end = Ending(SimpleNamespace(cloud=cloud), None, None)
    assert rounding._at_few_particles(run, end) == 0.75


@pytest.mark.parametrize(("error", "known"), [(0.01, True), (0.03, False)])
def test_a_small_change_is_known_if_it_is_sure(error, known):
    """However many units of the last digit it is, and however small beside its error."""
    found = rounding.Correction(np.array([0.002]), np.array([error**2]))
    assert rounding._is_known(found, np.array([1e-6])) == known


@pytest.mark.parametrize(("spread", "known"), [(0.0, True), (0.6, False)])
def test_a_large_change_is_rounding_if_it_is_that_of_a_constant(monkeypatch, spread, known):
    noise = np.linspace(-spread, spread, 4)[:, None, None]
    found = rounding._compare(np.zeros((4, 1, 5)), 2.0 + np.tile(noise, (1, 1, 5)))
    monkeypatch.setattr(rounding, "_in_double", lambda *_: found)
    monkeypatch.setattr(rounding, "_at_few_particles", lambda *_: 2.0)
    cloud = SimpleNamespace(potential=jnp.full((4, 1, 5), 3.0, jnp.float32))
    bridge = Bridge(np.array(-3.0), np.array(0.01), np.array(1.0), np.full(4, -3.0))
    put_right = rounding.correct(None, Ending(SimpleNamespace(cloud=cloud), None, bridge))
    assert (put_right.bridge.log_evidence > -2.0) == known
    assert (put_right.bridge.standard_error > 1.9) != known


def test_programs_that_draw_are_known():
    def drawn(x):
        return jax.jit(lambda y: y + random.normal(random.key(1)))(x)

    assert rounding._draws_numbers(jax.make_jaxpr(drawn)(1.0).jaxpr)
    assert not rounding._draws_numbers(jax.make_jaxpr(jax.jit(jnp.sin))(1.0).jaxpr)


def test_what_double_precision_makes_another_model_is_left_alone():
    """Random numbers of a fixed key are others there."""

    def noisy(y):
        model(2 * y + random.normal(random.key(5), (6,)))

    jala = JALAEM(noisy, num_particles=256)
    jala.run(random.key(0), 60, SCHOOLS, progress_bar=False)
    y = 2 * SCHOOLS + np.asarray(random.normal(random.key(5), (6,)))
    best = normal_means_log_likelihood(jala.params, y) + CONSTANT
    assert abs(jala.log_evidence - best) < 4 * jala.log_evidence_se


@pytest.mark.parametrize(("size", "asks"), [(100.0, False), (1e4, True)])
def test_rounding_that_nobody_would_see_asks_for_no_program(monkeypatch, size, asks):
    """However small the error of the evidence: it may be so in one run and not in the next."""
    asked = []
    monkeypatch.setattr(rounding, "_in_double", lambda *_: asked.append(True))
    monkeypatch.setattr(rounding, "_at_few_particles", lambda *_: 0.0)
    cloud = SimpleNamespace(potential=jnp.full((2, 1, 4), size, jnp.float32))
    bridge = Bridge(np.array(-size), np.array(1e-9), np.array(1.0), np.full(2, -size))
    end = Ending(SimpleNamespace(cloud=cloud), None, bridge, None)
    found = rounding.correct(None, end).bridge.standard_error
    np.testing.assert_allclose(found, size * np.finfo(np.float32).eps, rtol=1e-6)
    assert bool(asked) == asks


def test_what_cannot_be_put_right_is_in_the_error(monkeypatch):
    """Of a model that does not go with double precision."""

    def refuse(*_):
        raise TypeError

    monkeypatch.setattr(rounding, "_potentials_in_double", refuse)
    jala = JALAEM(model, num_particles=256)
    jala.run(random.key(0), 60, SCHOOLS, progress_bar=False)
    assert abs(scaled_error(jala)) < 4
    assert jala.log_evidence_se > abs(CONSTANT) * np.finfo(np.float32).eps
