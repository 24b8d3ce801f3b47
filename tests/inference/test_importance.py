"""Importance sampling of many components, on targets with exact answers."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import special, stats

from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import estimation, importance
from numpyro_jala.inference.evidence import Gaussian, bridge
from numpyro_jala.inference.importance import Importance
from tests.tools import assert_mean

#: Components of one, two, three and one coordinates, in blocks of one and of three.
LABELS = np.array([2, 1, 2, 0, 3, 1, 2])
SEVERAL = partition(LABELS)
NUM_ISLANDS, NUM_DRAWS = 3, 16


def proposal_for(parts, dense=True):
    """Return a proposal for each island, none of them right."""
    rng = np.random.default_rng(0)
    blocks = []
    for index in parts.blocks:
        shape = (NUM_ISLANDS, *index.shape)
        scale = 0.6 + 0.5 * rng.random(shape)
        if dense:
            lower = np.tril(rng.normal(size=(*shape, shape[-1])), -1) / 4
            scale = scale[..., None] * np.eye(shape[-1]) + lower
        blocks.append(jnp.asarray(scale))
    mean = jnp.asarray(rng.normal(size=(NUM_ISLANDS, parts.dim)) / 3 + 0.7)
    return Gaussian(mean, Factor(tuple(blocks)))


def drawn(rng_key, proposal, parts, points):
    shifts = importance.draw_shifts(rng_key, proposal, parts)
    return importance.draw(shifts, proposal, parts, points)


def estimate(log_ratio):
    """Estimate from the sums of four blocks of draws."""
    blocks = map(importance.sums, jnp.split(log_ratio, 4, -1))
    return importance.estimate(reduce(importance.merge, blocks), log_ratio.shape[-1])


def points_for(parts, num_draws=NUM_DRAWS):
    points = importance.sobol_points(num_draws, int(parts.sizes.max()) + 1)
    return jnp.asarray(points)


@pytest.mark.parametrize("dense", [True, False])
def test_the_density_is_that_of_a_student_t(dense):
    proposal, points = proposal_for(SEVERAL, dense), points_for(SEVERAL)
    position, log_density = jax.jit(drawn, static_argnums=2)(
        random.key(0), proposal, SEVERAL, points
    )
    assert position.shape == (NUM_ISLANDS, NUM_DRAWS, SEVERAL.dim)
    assert log_density.shape == (NUM_ISLANDS, SEVERAL.num_components, NUM_DRAWS)
    density_of = jax.jit(importance.log_density, static_argnums=1)
    again = density_of(proposal, SEVERAL, position)
    np.testing.assert_allclose(again, log_density, rtol=1e-3, atol=1e-3)
    owner = 0
    for block in proposal.factor.blocks:
        for component in range(block.shape[1]):
            mine, size = SEVERAL.owner == owner, SEVERAL.sizes[owner]
            for island in range(NUM_ISLANDS):
                root = np.asarray(block[island, component], float)
                root = (root if dense else np.diag(root))[:size, :size]
                loc = np.asarray(proposal.mean[island, mine], float)
                law = stats.multivariate_t(loc, root @ root.T, df=4)
                expected = law.logpdf(np.asarray(position[island][:, mine], float))
                found = log_density[island, owner]
                np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
            owner += 1


SHAPE = np.array([3.0, 1.5, 2.0, 4.0, 2.5, 3.5, 1.8])
MIX = np.linalg.inv(np.eye(7) + 0.4 * np.tril(LABELS[:, None] == LABELS, -1))


def log_target(parts, x):
    """Logs of gamma variables, skewed, mixed within each component, by component."""
    y = jnp.einsum("de,jne->jnd", jnp.asarray(MIX), x)
    terms = jnp.where(jnp.isfinite(y), SHAPE * y - jnp.exp(y), -jnp.inf)
    return parts.total(terms)


def exact_log_evidence(parts):
    """The mixing has determinant one."""
    return np.bincount(parts.owner, special.gammaln(SHAPE))


@pytest.mark.parametrize("parts", [joint(7), SEVERAL], ids=["one", "several"])
def test_evidence_is_unbiased_for_components_of_any_size(parts):
    proposal, points = proposal_for(parts), points_for(parts)

    def one(rng_key):
        position, log_density = drawn(rng_key, proposal, parts, points)
        ratio = jnp.exp(log_target(parts, position) - log_density)
        first = np.array([np.flatnonzero(parts.owner == c)[0] for c in range(count)])
        moment = jnp.swapaxes(jnp.tanh(position[..., first]), 1, 2)
        return ratio.mean((0, 2)), (ratio * moment).mean((0, 2)), ratio[0, :, 0]

    count = parts.num_components
    keys = random.split(random.key(1), 20_000)
    found, moments, single = jax.jit(lambda k: jax.lax.map(one, k, batch_size=500))(keys)
    exact = np.exp(exact_log_evidence(parts))
    for component in range(count):
        share = np.asarray(found[:, component], float) / exact[component]
        assert_mean(share, 1.0, resolution=0.1 if parts.is_joint else 0.02)
        # One draw by itself is unbiased too, though not as precise.
        alone = np.asarray(single[:, component], float) / exact[component]
        assert alone.std() > 1.5 * share.std()
        if not parts.is_joint:
            assert_mean(alone, 1.0, resolution=0.1)
    # Under the target exp(y) is a gamma variable: of a component of one, check a mean.
    alone = np.flatnonzero(parts.sizes == 1)
    for component in alone:
        law = stats.loggamma(SHAPE[parts.owner == component][0])
        expected = law.expect(np.tanh, lb=-30.0, ub=6.0)
        mean = np.asarray(moments[:, component], float) / exact[component]
        assert_mean(mean, expected, resolution=0.02)


def test_every_shift_is_uniform_and_drawn_by_itself():
    proposal = proposal_for(SEVERAL)
    keys = random.split(random.key(0), 20_000)
    shifts = jax.vmap(lambda key: importance.draw_shifts(key, proposal, SEVERAL))(keys)
    columns = [np.asarray(each, float).reshape(20_000, -1) for each in shifts]
    together = np.concatenate(columns, 1)
    assert together.shape[1] == NUM_ISLANDS * (SEVERAL.dim + SEVERAL.num_components)
    correlation = np.corrcoef(together.T)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 5 / np.sqrt(20_000)
    for column in together.T:
        assert_mean(column, 0.5, resolution=0.01)
        assert_mean(column**2, 1 / 3, resolution=0.01)


def test_estimates_of_components_and_islands_are_independent():
    parts = partition(np.arange(2))
    one = Factor((jnp.ones((2, 2, 1)),))
    proposal = Gaussian(jnp.zeros((2, 2)), one)
    points = points_for(parts, 8)

    def means(rng_key):
        position, log_density = drawn(rng_key, proposal, parts, points)
        # Skewed, so that errors do not cancel by symmetry.
        ratio = jnp.exp(2 * position - jnp.exp(position))
        weight = ratio / jnp.exp(jnp.swapaxes(log_density, 1, 2))
        return weight.mean(1).ravel()

    found = jax.jit(jax.vmap(means))(random.split(random.key(0), 20_000))
    correlation = np.corrcoef(np.asarray(found, float).T)
    apart = correlation[~np.eye(4, dtype=bool)]
    assert np.abs(apart).max() < 5 / np.sqrt(20_000)


def test_many_draws_know_more_than_independent_ones_would():
    proposal = proposal_for(SEVERAL)
    keys = random.split(random.key(2), 400)

    def error(num_draws):
        points = points_for(SEVERAL, num_draws)

        def one(rng_key):
            position, log_density = drawn(rng_key, proposal, SEVERAL, points)
            ratio = jnp.exp(log_target(SEVERAL, position) - log_density)
            return ratio.mean((0, 2)) / jnp.exp(exact_log_evidence(SEVERAL))

        return np.asarray(jax.jit(jax.vmap(one))(keys)).std(0)

    # Sixteen times the draws: independent ones would be four times as precise.
    assert (error(16) / error(256) > 4.5).all()


def test_points_are_a_sequence_of_sobol():
    points = importance.sobol_points(64, 5)
    assert points.shape == (64, 5) and points.dtype == np.float32
    # In each coordinate one point in every interval of a sixty-fourth.
    assert (np.sort(points, 0) * 64 == np.arange(64)[:, None]).all()


def test_an_estimate_takes_the_bias_of_the_logarithm_out():
    rng = np.random.default_rng(0)
    num_islands, num_draws, num_runs = 8, 4, 20_000
    spread, level = np.array([0.5, 1.0]), np.array([-1.0, 30.0])
    noise = rng.gamma(2.0, size=(num_runs, num_islands, 2, num_draws))
    log_ratio = level[:, None] - spread[:, None] * noise
    found = jax.jit(jax.vmap(estimate))(jnp.asarray(log_ratio, jnp.float32))
    # E[exp(-s g)] = (1 + s)^-2 for a gamma variable of shape two.
    exact = level - 2 * np.log1p(spread)
    plain = np.log(np.exp(log_ratio).mean((1, 3)))
    for component in range(2):
        error = np.asarray(found.log_evidence[:, component], float) - exact[component]
        bias = exact[component] - plain[:, component].mean()
        assert bias > 0
        assert_mean(error, 0.0, resolution=bias)
        variance = np.asarray(found.variance[:, component], float).mean()
        np.testing.assert_allclose(variance, plain[:, component].var(), rtol=0.05)


def test_an_estimate_by_hand():
    rng = np.random.default_rng(1)
    log_ratio = rng.normal(size=(4, 2, 8))
    found = estimate(jnp.asarray(log_ratio))
    weight = np.exp(log_ratio)
    each = weight.mean(-1)
    variance = (each / each.mean(0)).var(0, ddof=1) / 4
    np.testing.assert_allclose(found.variance, variance, rtol=1e-4)
    np.testing.assert_allclose(
        found.log_evidence, np.log(each.mean(0)) + variance / 2, rtol=1e-4
    )
    np.testing.assert_allclose(found.islands, np.log(each), rtol=1e-4, atol=1e-6)
    total = weight.sum((0, 2))
    ess = total**2 / (weight**2).sum((0, 2)) / 32
    np.testing.assert_allclose(found.ess, ess, rtol=1e-4)


def test_components_are_summed_in_double_precision():
    rng = np.random.default_rng(0)
    islands = rng.normal(size=(5, 1_000)).astype(np.float32)
    level = np.full(1_000, 12_345.0, np.float32)
    variance = rng.gamma(2.0, 1e-3, size=1_000).astype(np.float32)
    log_evidence = (islands.mean(0) + variance / 2).astype(np.float32)
    ess = np.linspace(0.2, 0.9, 1_000).astype(np.float32)
    given = Importance(*(jnp.asarray(v) for v in (log_evidence, variance, ess, islands)))
    found = importance.summed(given, level)
    exact = log_evidence.astype(float).sum() - 12_345.0 * 1_000
    assert abs(found.log_evidence - exact) < 1e-6
    np.testing.assert_allclose(found.standard_error**2, variance.sum(), rtol=1e-5)
    np.testing.assert_allclose(found.overlap, 0.2, rtol=1e-6)
    # The variance is that of a mean of five islands, and each has five times as much.
    by_island = (islands.astype(float) + 5 * variance / 2).sum(1) - 12_345.0 * 1_000
    np.testing.assert_allclose(found.islands, by_island, rtol=0, atol=1e-5)


def test_a_bridge_is_built_for_each_component_and_chosen_for_some():
    keys = random.split(random.key(0), 3)
    at_particles, at_draws = (random.normal(key, (4, 3, 16)) for key in keys[:2])
    at_draws = at_draws - 0.5
    weight = normalise(random.normal(keys[2], (4, 3, 16)))
    plain = jax.jit(estimate)(at_draws)
    found = jax.jit(importance.bridged)(plain, weight, at_particles, at_draws)
    for component in range(3):
        own = (each[:, component] for each in (weight, at_particles, at_draws))
        alone = bridge(*own, is_quasi=True)
        for ours, theirs in (
            (found.log_evidence[component], alone.log_evidence),
            (found.variance[component], alone.standard_error**2),
            (found.islands[:, component], alone.islands),
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    second = np.array([True, False, True])
    chosen = importance.choose(second, plain, found)
    for one, first, other in zip(chosen, plain, found, strict=True):
        np.testing.assert_array_equal(one[..., second], other[..., second])
        np.testing.assert_array_equal(one[..., ~second], first[..., ~second])


def test_a_draw_without_derivatives_that_weighs_nothing_does_not_count():
    """Beyond three a draw is impossible, and the derivative of its logarithm NaN."""

    def potential(params, temperature, position):
        room = jnp.maximum(3.0 - position, 0.0) * params[0]
        return -jnp.log(room) + params[1] ** 2 * position**2

    position = jnp.array([-1.0, 0.5, 2.0, 4.0])[None, :, None]
    params = jnp.array([0.7, 1.3])
    target = Target(params, jnp.ones((1, 1)))
    log_base = jnp.log(jnp.array([0.1, 0.5, 0.2, 0.2]))[None, None]
    found = estimation._weigh_each(None, potential, target, position, log_base)
    x, base = np.array([-1.0, 0.5, 2.0]), np.array([0.1, 0.5, 0.2])
    weight = base * 0.7 * (3 - x) * np.exp(-(1.3**2) * x**2)
    expected = [-weight.sum() / 0.7, 2 * 1.3 * np.sum(weight * x**2)]
    np.testing.assert_allclose(found.first, np.log(weight.sum()), rtol=1e-5)
    np.testing.assert_allclose(found.mean[0, 0] * weight.sum(), expected, rtol=1e-5)
    possible = position[:, :3], log_base[..., :3]
    reverse = estimation._weigh_all(potential, target, *possible)
    np.testing.assert_allclose(reverse[0], expected, rtol=1e-5)


def test_sums_of_two_sets_are_those_of_all_draws():
    keys = random.split(random.key(3), 2)
    log_ratio = 3 * random.normal(keys[0], (2, 3, 12))
    values = random.normal(keys[1], (2, 3, 12, 2)) + 1.0
    log_ratio = log_ratio.at[0, 1, :5].set(-jnp.inf)  # nothing in the first set
    parts = [
        (log_ratio[..., rows], values[:, :, rows]) for rows in (slice(5), slice(5, 12))
    ]
    merged = importance.merge(*(importance.sums(*part) for part in parts))
    for one, other in zip(merged, importance.sums(log_ratio, values), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
