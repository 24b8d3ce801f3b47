import jax.numpy as jnp
import numpy as np
import optax
import pytest

from numpyro_jala.engine import em

COMPLETE = jnp.array([[4.0, 1.0], [1.0, 2.0]])
MISSING = jnp.array([[1.0, 0.2], [0.2, 1.2]])
SCORE = jnp.array([0.3, -0.8])


def test_a_newton_step_solves_the_observed_information():
    info = em.information_basis(COMPLETE, MISSING, 1e-6)
    far = jnp.full(2, 1e6)
    step = em.trusted_step(info, SCORE, 1.0, 1e-6 * jnp.eye(2), far)
    expected = -np.linalg.solve(COMPLETE - MISSING, SCORE)
    np.testing.assert_allclose(step, expected, rtol=1e-3)
    np.testing.assert_allclose(
        em.decrement(info, SCORE), -0.5 * SCORE @ expected, rtol=1e-3
    )
    half = em.trusted_step(info, SCORE, 0.5, 1e-6 * jnp.eye(2), far)
    np.testing.assert_allclose(half, 0.5 * expected, rtol=1e-3)


def test_what_is_all_missing_is_floored():
    info = em.information_basis(COMPLETE, COMPLETE, 0.05)
    np.testing.assert_allclose(info.observed, 0.05, rtol=1e-4)
    assert em.floor_for(jnp.asarray(True)) == 1.0 and em.floor_for(jnp.asarray(False)) < 0.1


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_long_step_ends_on_the_edge_of_the_trust_region_and_still_descends(scale):
    info = em.information_basis(COMPLETE, 0 * MISSING, 0.05)
    cost, reach = jnp.array([[5.0, -1.0], [-1.0, 3.0]]), jnp.array([1e3, 1e3])
    score = scale * jnp.array([3.0, -8.0])
    step = em.trusted_step(info, score, 0.5, cost, reach)
    np.testing.assert_allclose(step @ cost @ step, em.TRUST, rtol=1e-2)
    assert score @ step < 0


def test_no_parameter_goes_beyond_its_reach():
    info = em.information_basis(1e-4 * COMPLETE, 0 * MISSING, 0.05)
    step = em.trusted_step(info, SCORE, 0.5, 0 * MISSING, jnp.array([0.7, 10.0]))
    assert abs(step[0]) <= 0.71 and abs(step[1]) <= 10.1
    assert abs(step[1]) > 1.0


def test_a_parameter_of_size_ten_thousand_does_not_hold_up_the_others():
    info = em.information_basis(jnp.diag(jnp.array([2.4, 29.0])), 0 * MISSING, 0.05)
    cost, reach = jnp.diag(jnp.array([1e-8, 10.0])), jnp.array([1e4, 0.7])
    step = em.trusted_step(info, jnp.array([1e-3, 25.0]), 0.4, cost, reach)
    edge = np.sqrt(em.TRUST / (10.0 + em.TRUST / 0.7**2))
    np.testing.assert_allclose(step[1], -edge, rtol=0.02)


def test_the_gain_falls_with_reversals_only():
    newton = em.start_newton(2, jnp.float32)
    newton = newton._replace(complete=COMPLETE, last_step=jnp.array([1.0, 0.0]))
    assert em.turned_back(newton, jnp.array([-1.0, 0.0]))
    assert not em.turned_back(newton, jnp.array([1.0, 0.0]))
    later = newton._replace(reversals=jnp.asarray(30.0))
    assert em.gain(later) < 0.6 * em.gain(newton)


def test_the_average_weighs_step_k_by_its_cube():
    values = np.random.default_rng(0).normal(size=40)
    mean = jnp.zeros(())
    for k, value in enumerate(values, start=1):
        mean = em.average(mean, value, k)
    rise = np.cumprod([1.0] + [(k + 3) / k for k in range(1, 40)])
    np.testing.assert_allclose(mean, np.average(values, weights=rise), rtol=1e-4)


def test_missing_information_is_remembered_at_the_posterior_only():
    newton, at_posterior = em.start_newton(2, jnp.float32), jnp.asarray(False)
    first = em.remember(newton, MISSING, at_posterior)
    np.testing.assert_allclose(first, MISSING)
    newton = newton._replace(missing=first)
    later = em.remember(newton, 2 * MISSING, at_posterior)
    np.testing.assert_allclose(later, 1.1 * MISSING, rtol=1e-5)
    tempered = em.remember(newton, 2 * MISSING, ~at_posterior)
    np.testing.assert_allclose(tempered, 2 * MISSING)


@pytest.mark.parametrize(
    ("curvature", "overshot", "before", "expected"),
    [
        ([4.0, 2.0], True, True, False),  # smooth
        ([4.0, 0.01], False, False, False),  # far off
        ([4.0, 0.01], True, False, True),
        ([4.0, 0.01], False, True, True),  # as it was
        ([4.0, -2.0], True, False, True),
        ([4.0, np.nan], False, False, True),
    ],
)
def test_kinks_are_known_by_steps_that_go_too_far(curvature, overshot, before, expected):
    newton = em.start_newton(2, jnp.float32)._replace(by_scores=jnp.asarray(before))
    complete = jnp.diag(jnp.array(curvature))
    assert bool(em.is_kinked(newton, complete, COMPLETE, overshot, 3)) is expected
    # As many components as params tell nothing, but a derivative that is missing is missing.
    few = em.is_kinked(newton, complete, COMPLETE, overshot, 2)
    assert bool(few) is bool(np.isnan(curvature[1]))


def test_a_step_is_shortened_to_the_variance_it_may_cause():
    step = jnp.array([1.0, -2.0])
    np.testing.assert_allclose(em.shorten(step, 0.4, 0.1), 0.5 * step, rtol=1e-5)
    np.testing.assert_array_equal(em.shorten(step, 0.05, 0.1), step)


def test_optax_and_numpyro_optimisers_descend_alike():
    import numpyro

    start = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    score = {"a": jnp.array([0.5, -1.0]), "b": jnp.array(2.0)}
    ends = []
    for optim in (optax.sgd(0.1), numpyro.optim.SGD(0.1)):
        optimiser = em.as_optimiser(optim)
        params, _ = optimiser.step(score, optimiser.init(start), start)
        ends.append(params)
    for params in ends:
        np.testing.assert_allclose(params["a"], [0.95, 2.1], rtol=1e-6)
        np.testing.assert_allclose(params["b"], 2.8, rtol=1e-6)


def test_a_change_is_near_when_none_of_its_steps_costs_too_much():
    missing = jnp.array([[2.0, 0.3], [0.3, 1.0]])
    newton = em.start_newton(2, jnp.float32)._replace(missing=missing)
    change = jnp.array([0.6, -0.4])
    cost = float(change @ missing @ change)
    steps = int(np.ceil(np.sqrt(cost / (4 * em.TRUST))))
    assert em.is_near(newton, change, steps, 1)
    assert not em.is_near(newton, change, steps - 1, 1)
    assert em.num_steps_to(newton._replace(missing=-missing), change, 1) == 0
    # Several components share what a change costs in all.
    many = newton._replace(missing=5 * missing)
    assert em.is_near(many, change, steps, 5)
    assert not em.is_near(many, change, steps, 1)
    assert not em.is_near(many, change, steps - 1, 5)
    # Though the cloud can follow, the likelihood may not be quadratic so far.
    sharp = newton._replace(complete=jnp.diag(jnp.array([0.0, 24.0])))
    assert em.is_near(sharp, change, steps, 1)
    assert not em.is_near(sharp, 1.1 * change, steps + 1, 1)
