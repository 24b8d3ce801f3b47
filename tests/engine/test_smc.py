"""The engine on targets with exact answers, neither symmetric nor centred."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax, random

from numpyro_jala.engine import evaluation, langevin, smc
from numpyro_jala.engine.adaptation import momentum_memory
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import IDENTITY, Factor
from numpyro_jala.engine.langevin import Kernel
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.resampling import SCHEMES, systematic
from tests.tools import assert_mean

NUM_STEPS, NUM_PARTICLES = 4, 16
PARAMS = jnp.array([0.3, -0.2])
JOINT = joint(2)
#: Components of one, two and three coordinates, the latter two in one block.
SEVERAL = partition(np.array([2, 1, 2, 0, 1, 2]))
SLANT = {2: np.array([0.8, -0.3]), 6: np.array([0.8, -0.3, 0.2, 0.5, -0.4, 0.1])}
FACTORS = {
    "dense": Factor((jnp.array([[[0.8, 0.0], [0.4, 0.6]]]),)),
    "diagonal": Factor((jnp.array([[0.9, 0.5]]),)),
    "none": IDENTITY,
}
_TRIANGLE = jnp.array([[0.8, 0.0, 0.0], [0.4, 0.6, 0.0], [-0.2, 0.3, 0.7]])
BLOCKS = {
    "dense": Factor((jnp.full((1, 1, 1), 0.8), jnp.stack([_TRIANGLE, 1.1 * _TRIANGLE]))),
    "diagonal": Factor((jnp.full((1, 1), 0.8), jnp.array([[0.9, 0.5, 1e-10], [0.7] * 3]))),
    "none": IDENTITY,
}


def potential_of(parts):
    """From a wide normal to the density of logs of gamma variables: skewed."""
    owner, slant = parts.owner, SLANT[parts.dim]
    is_own = owner[:, None] == np.arange(parts.num_components)

    def potential(params, temperature, x):
        wide = 0.5 * x**2 / 4 + 0.5 * jnp.log(2 * jnp.pi * 4)
        shape = jnp.exp(params)[np.arange(parts.dim) % 2] + 2
        skewed = jnp.exp(x) - shape * x + slant * x
        heat = temperature[owner]
        terms = (1 - heat) * wide + heat * skewed
        return jnp.sum(jnp.where(is_own, terms[:, None], 0.0), 0)

    return potential


def gamma_shapes(params, parts):
    """Return the shapes of the gamma variables at the end of the path."""
    pair = np.exp(np.asarray(params, float))
    return pair[np.arange(parts.dim) % 2] + 2 - SLANT[parts.dim]


def exact_evidence(params, parts):
    logs = scipy.special.gammaln(gamma_shapes(params, parts))
    return np.exp(np.bincount(parts.owner, logs))


def one(tree):
    """Return what is given for one island."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def run_steps(parts, rng_key, factor, step_size, shift, threshold, pause, memory):
    start_key, momentum_key, *keys = random.split(rng_key, 2 + NUM_STEPS)
    position = 2 * random.normal(start_key, (1, NUM_PARTICLES, parts.dim))
    potential_fn, params = potential_of(parts), PARAMS
    num_components = parts.num_components
    # Components go their ways at their own pace.
    pace, size = jnp.linspace(1.0, 1.4, num_components), 0.8 ** jnp.arange(num_components)

    def evaluate_at(target, x):
        return evaluation.evaluate_model(potential_fn, parts, target, x, True)

    cold = Target(params, jnp.zeros((1, num_components)))
    found, _ = evaluate_at(cold, position)
    momentum = random.normal(momentum_key, position.shape)
    cloud = smc.initial_cloud(parts, position, momentum, found, jnp.zeros(()))
    shift = jnp.resize(shift, parts.dim)
    for i, key in enumerate(keys):
        params = params + jnp.array([0.05, -0.1])
        target = Target(params, one(((i + 1) / NUM_STEPS) ** pace))
        evaluate = partial(evaluate_at, target)
        keeps = memory * size
        kernel = Kernel(*one((step_size * size, factor, shift, keeps)))
        move_key, pause_key, resample_key = random.split(key, 3)
        cloud, _, _ = smc.step(move_key, parts, cloud, kernel, evaluate, False)
        if pause:
            kernel = Kernel(*one((pause * size, factor, 0 * shift, keeps)))
            cloud, _, _ = smc.step(pause_key, parts, cloud, kernel, evaluate, True)
        due = smc.is_due(cloud, threshold)
        cloud = smc.resample(resample_key, parts, cloud, systematic, due)
    weight = jnp.exp(cloud.log_evidence[0, :, None] + cloud.log_weight[0])
    first = np.array([np.flatnonzero(parts.owner == c)[0] for c in range(num_components)])
    x, m = (rows[0][:, first].T for rows in (cloud.position, cloud.momentum))
    moments = jnp.mean(weight * jnp.stack([jnp.ones_like(x), x, m, m**2, x * m]), -1)
    return moments, params, first  # (moments, components)


@pytest.mark.parametrize(
    ("parts", "kind", "step_size", "shift", "threshold", "pause", "memory"),
    [
        (JOINT, "none", 0.05, (0.0, 0.0), 0.0, 0.0, 0.0),
        (JOINT, "dense", 0.3, (0.0, 0.0), 0.6, 0.0, 0.7),
        (JOINT, "diagonal", 0.1, (0.05, -0.1), 1.0, 0.8, 0.0),
        (JOINT, "dense", 0.0, (0.05, 0.05), 0.7, 1.5, 0.5),
        (JOINT, "diagonal", 0.0, (0.0, 0.0), 0.7, 2.5, 1.0),
        (SEVERAL, "none", 0.05, (0.0, 0.0), 0.0, 0.0, 0.0),
        (SEVERAL, "dense", 0.3, (0.05, -0.1), 0.6, 0.0, 0.7),
        (SEVERAL, "diagonal", 0.1, (0.0, 0.0), 1.0, 0.8, 0.0),
        (SEVERAL, "dense", 0.0, (0.05, 0.05), 0.7, 1.5, 0.5),
    ],
)
def test_evidence_and_moments_are_unbiased(
    parts, kind, step_size, shift, threshold, pause, memory
):
    factor = (FACTORS if parts.is_joint else BLOCKS)[kind]
    arguments = (factor, step_size, jnp.array(shift), threshold, pause, memory)
    run = jax.jit(jax.vmap(lambda key: run_steps(parts, key, *arguments)))
    # Of three coordinates the weights vary more than of two.
    num_runs, coarser = (40_000, 1) if parts.is_joint else (16_000, 2)
    moments, params, first = run(random.split(random.key(4), num_runs))
    exact = exact_evidence(params[0], parts)
    for component in range(parts.num_components):
        scaled = moments[..., component].T / exact[component]
        mean, x, m, m_squared, product = scaled
        assert_mean(mean, 1.0, resolution=0.025 * coarser)
        shape = gamma_shapes(params[0], parts)[first[0, component]]
        expected = float(scipy.special.digamma(shape))
        assert_mean(x, expected, resolution=0.035 * coarser)
        # The momentum is standard normal, whatever the position.
        assert_mean(m, 0.0, resolution=0.05 * coarser)
        assert_mean(m_squared, 1.0, resolution=0.05 * coarser)
        assert_mean(product, 0.0, resolution=0.05 * coarser)


@pytest.mark.parametrize("kind", FACTORS)
def test_the_move_has_the_drift_and_the_noise_of_langevin(kind):
    kernel = Kernel(jnp.array([0.2]), FACTORS[kind], jnp.array([1.0, 2.0]), jnp.zeros(1))
    gradient = jnp.tile(jnp.array([0.5, -1.5]), (200_000, 1))
    start = jnp.zeros_like(gradient)
    moved = langevin.move(JOINT, random.key(0), kernel, start, gradient, start[:, :0])
    root = FACTORS[kind].blocks[0][0] if kind != "none" else jnp.eye(2)
    root = jnp.diag(root) if kind == "diagonal" else root
    metric = root @ root.T
    expected = jnp.array([1.0, 2.0]) - 0.2 * metric @ gradient[0]
    for axis in range(2):
        assert_mean(moved.position[:, axis], float(expected[axis]), resolution=0.01)
    np.testing.assert_allclose(np.cov(moved.position.T), 0.4 * metric, atol=0.005)


@pytest.mark.parametrize("kind", ["dense", "diagonal"])
def test_each_component_moves_with_its_own_step_size(kind):
    sizes = jnp.array([0.1, 0.2, 0.4])
    kernel = Kernel(sizes, BLOCKS[kind], jnp.arange(6.0), jnp.zeros(3))
    one_gradient = jnp.array([0.5, -1.5, 1.0, 0.7, -0.4, 0.2])
    gradient = jnp.tile(one_gradient, (100_000, 1))
    start = jnp.zeros_like(gradient)
    moved = langevin.move(SEVERAL, random.key(0), kernel, start, gradient, start[:, :0])
    covariance = np.cov(moved.position.T)
    roots = [np.asarray(row) for block in BLOCKS[kind].blocks for row in block]
    if kind == "diagonal":
        roots = [np.diag(root) for root in roots]
    for component, (root, h) in enumerate(zip(roots, sizes, strict=True)):
        mine = np.flatnonzero(SEVERAL.owner == component)
        root = root[: mine.size, : mine.size]
        metric = root @ root.T
        drift = mine - h * metric @ one_gradient[mine]
        for axis, expected in zip(mine, drift, strict=True):
            assert_mean(moved.position[:, axis], float(expected), resolution=0.02)
        found = covariance[np.ix_(mine, mine)]
        np.testing.assert_allclose(found, 2 * h * metric, atol=0.02)
        others = covariance[mine][:, SEVERAL.owner != component]
        np.testing.assert_allclose(others, 0.0, atol=0.02)


def test_a_gradient_that_is_not_finite_is_harmless():
    kernel = Kernel(jnp.array([0.1]), IDENTITY, jnp.zeros(2), jnp.zeros(1))
    gradient = jnp.array([[jnp.nan, 1.0], [jnp.inf, 0.0]])
    assert np.isfinite(langevin.pull(JOINT, kernel, gradient)).all()


def test_a_metropolis_test_is_exact_where_forces_are_bounded():
    """Exact draws stay exact: what passes the test has no drift on average."""
    parts, size = joint(1), 100_000
    kernel = Kernel(
        jnp.array([0.5]), Factor((jnp.full((1, 1, 1), 3.0),)), jnp.zeros(1), jnp.zeros(1)
    )
    draw_key, move_key = random.split(random.key(0))
    x = jnp.log(random.gamma(draw_key, 2.0, (size, 1)))  # logs of gamma variables: a cliff
    gradient = jnp.exp(x) - 2
    moved = langevin.move(parts, move_key, kernel, x, gradient, x[:, :0])
    is_bounded = np.abs(moved.force) < 0.99 * np.abs(3 * gradient)
    assert 0.05 < is_bounded.mean() < 0.2
    new = moved.position
    work = langevin.work(parts, kernel, moved, jnp.exp(new) - 2)[0]
    change = (jnp.exp(x) - 2 * x - jnp.exp(new) + 2 * new)[:, 0]
    passed = jnp.exp(jnp.minimum(change + work, 0.0))
    assert_mean(passed * (new - x)[:, 0], 0.0, resolution=0.02)


def resting(parts, num_particles, keeps_momentum, potential_fn=None):
    """Return particles at a fixed target with unequal weights, and its evaluation."""
    target = Target(PARAMS, jnp.ones((1, parts.num_components)))
    potential_fn = potential_fn or potential_of(parts)

    def evaluate(x):
        found, score_fn = evaluation.evaluate_model(potential_fn, parts, target, x, True)
        if not parts.is_joint:
            scores = evaluation.evaluate_scores(potential_fn, target, x)[1]
            found = found._replace(scores=scores)
        return found, score_fn

    position = random.normal(random.key(0), (1, num_particles, parts.dim))
    momentum = 0 * position[..., : parts.dim * keeps_momentum]
    cloud = smc.initial_cloud(
        parts, position, momentum, evaluate(position)[0], jnp.zeros(())
    )
    log_weight = random.normal(random.key(1), cloud.log_weight.shape)
    return cloud._replace(log_weight=log_weight), evaluate


def kernel_of(parts, step_size, shift=0.0):
    """Return one island's kernel without a factor or memory."""
    size = jnp.broadcast_to(jnp.asarray(step_size), (1, parts.num_components))
    return Kernel(size, IDENTITY, jnp.full((1, parts.dim), shift), 0 * size)


@pytest.mark.parametrize("keeps_momentum", [True, False])
@pytest.mark.parametrize("parts", [JOINT, SEVERAL], ids=["one", "several"])
def test_a_test_refuses_moves_and_leaves_weights_and_derivatives_consistent(
    parts, keeps_momentum
):
    cloud, evaluate = resting(parts, 200, keeps_momentum)
    kernel = kernel_of(parts, jnp.array([1.5, 0.9, 0.4])[: parts.num_components])
    new, _, info = smc.step(random.key(2), parts, cloud, kernel, evaluate, True)
    assert info.died == 0
    np.testing.assert_array_equal(new.log_weight, cloud.log_weight)
    same = new.position == cloud.position
    for component in range(parts.num_components):
        mine = same[..., parts.owner == component]
        stayed = mine.all(-1)
        # All coordinates of a component move, or none.
        assert (mine.any(-1) == stayed).all()
        increment = info.increment[:, component]
        assert 20 < stayed.sum() < 180
        assert (increment[~stayed] > increment.min()).all()
    again = evaluate(new.position)[0]
    for name, true in again._asdict().items():
        np.testing.assert_allclose(getattr(new, name), true, rtol=1e-5, atol=1e-5)
    if parts is SEVERAL:  # each component is tested by itself
        by_component = parts.total(same.astype(int)) == parts.sizes[:, None]
        patterns = {tuple(map(bool, column)) for column in by_component[0].T}
        assert len(patterns) == 2**3


def test_each_component_is_tested_with_a_draw_of_its_own():
    parts = partition(np.arange(2))
    bowl = lambda params, temperature, x: 0.5 * x**2  # noqa: E731
    cloud, evaluate = resting(parts, 2_000, False, bowl)
    kernel = kernel_of(parts, 1.0)
    new, _, info = smc.step(random.key(2), parts, cloud, kernel, evaluate, True)
    passed, increment = (new.position != cloud.position)[0].T, info.increment[0]
    # One draw for both would pass the better whenever the worse.
    odd = passed[1] & ~passed[0] & (increment[0] > increment[1])
    assert odd.any()


@pytest.mark.parametrize("keeps_momentum", [True, False])
def test_a_component_that_is_refused_stays_while_others_move(keeps_momentum):
    cloud, evaluate = resting(SEVERAL, 50, keeps_momentum)
    # A step far too long for the second component, and tiny ones for the others.
    kernel = kernel_of(SEVERAL, jnp.array([1e-4, 1e4, 1e-4]))
    new, _, _ = smc.step(random.key(2), SEVERAL, cloud, kernel, evaluate, True)
    stays = new.position == cloud.position
    assert stays[..., SEVERAL.owner == 1].all() and stays.mean() < 0.4
    np.testing.assert_array_equal(new.potential[:, 1], cloud.potential[:, 1])
    assert (new.potential[:, 0] != cloud.potential[:, 0]).mean() > 0.9
    if keeps_momentum:  # what is refused turns round
        kept = SEVERAL.owner == 1
        moved = langevin.move(
            SEVERAL,
            random.split(random.split(random.key(2))[0], 1)[0],
            jax.tree.map(lambda leaf: leaf[0], kernel),
            cloud.position[0],
            cloud.gradient[0],
            cloud.momentum[0],
        )
        np.testing.assert_array_equal(new.momentum[0][:, kept], -moved.momentum[:, kept])
        assert not np.allclose(new.momentum[0][:, ~kept], -moved.momentum[:, ~kept])


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 1_000)])
def test_noise_in_a_row_is_the_same_noise(shape):
    key, size = random.key(4), math.prod(shape)
    drawn = langevin.draw_noise(key, shape, jnp.float32)
    np.testing.assert_array_equal(drawn.ravel(), random.normal(key, (size,), jnp.float32))
    np.testing.assert_array_equal(drawn, random.normal(key, shape, jnp.float32))


def test_an_island_without_living_particles_is_not_resampled():
    log_weight = jnp.array([[-jnp.inf, -jnp.inf], [0.0, -9.0], [0.0, 0.1]])
    # Two components, of which one has the islands in another order.
    log_weight = jnp.stack([log_weight, log_weight[::-1]], 1)
    rows = jnp.zeros((3, 2, 2))
    columns = (log_weight, rows, rows, rows, rows[..., None], rows[..., 0])
    cloud = smc.Cloud(rows, rows, *columns)
    due = [[False, False], [True, True], [False, False]]
    np.testing.assert_array_equal(smc.is_due(cloud, 0.9), due)


@pytest.mark.parametrize("parts", [joint(3), partition(np.array([1, 0, 1]))])
def test_resampling_settles_the_mean_weight_and_keeps_the_evidence(parts):
    num_components = parts.num_components
    weight = jnp.array([[0.1, 0.2, 0.3, 5.4], [1.0, 1.0, 1.0, 1.1]])
    # The second component has the islands and the particles in the other order.
    log_weight = jnp.log(jnp.stack([weight, weight[::-1, ::-1]], 1)[:, :num_components])
    settled = jnp.array([[0.5, 0.2], [-1.0, 3.0]])[:, :num_components]
    rows = jnp.broadcast_to(jnp.arange(8.0).reshape(2, 4, 1), (2, 4, 3))
    each = jnp.broadcast_to(rows[:, None, :, 0], log_weight.shape)
    columns = (each, rows, each, each[..., None])
    cloud = smc.Cloud(rows, rows, log_weight, *columns, settled)
    due = smc.is_due(cloud, 0.5)
    expected = np.array([[True, False], [False, True]])[:, :num_components]
    np.testing.assert_array_equal(due, expected)
    new = smc.resample(random.key(0), parts, cloud, systematic, due)
    np.testing.assert_allclose(smc.log_evidence(cloud)[0, 0], 0.5 + np.log(1.5), rtol=1e-5)
    np.testing.assert_allclose(smc.log_evidence(new), smc.log_evidence(cloud), rtol=1e-6)
    assert (new.log_weight[due] == 0).all()
    np.testing.assert_array_equal(new.log_weight[~due], log_weight[~due])
    # What is kept of a particle is all of one particle, in each component.
    at_coordinates = jnp.swapaxes(new.potential[:, parts.owner], 1, 2)
    for field in (new.position, new.momentum, new.gradient):
        np.testing.assert_array_equal(field, at_coordinates)
    np.testing.assert_array_equal(new.scores[..., 0], new.potential)
    np.testing.assert_array_equal(new.slope, new.potential)
    assert (new.potential[0, 0] == 3).sum() >= 3
    np.testing.assert_array_equal(new.potential[~due], each[~due])
    if num_components > 1:
        assert (new.potential[1, 1] == 4).sum() >= 3


def test_components_are_resampled_with_draws_of_their_own():
    parts = partition(np.arange(2))
    shape = (1, 2, 512)
    log_weight = jnp.broadcast_to(random.normal(random.key(0), (512,)), shape)
    rows = jnp.broadcast_to(jnp.arange(512.0)[:, None], (1, 512, 2))
    each = jnp.zeros(shape)
    columns = (each, rows, each, each[..., :0], each[..., 0])
    cloud = smc.Cloud(rows, rows[..., :0], log_weight, *columns)
    due = jnp.ones((1, 2), bool)
    new = smc.resample(random.key(1), parts, cloud, SCHEMES["multinomial"], due)
    first, second = np.asarray(new.position[0].T)
    # With the same draws all would agree.
    assert 0 < (first == second).mean() < 0.5


@pytest.mark.parametrize("columns", [1, 0])
def test_a_particle_that_leaves_the_support_dies_and_the_rest_live(columns):
    def cliff(params, temperature, x):
        return jnp.where(x > 0, -jnp.log(x) + x, jnp.nan)

    parts, target = joint(1), Target(jnp.zeros(0), jnp.ones((1, 1)))
    evaluate = lambda x: evaluation.evaluate_model(cliff, parts, target, x, True)  # noqa: E731
    position = jnp.array([[[0.01], [2.0], [3.0]]])
    found, _ = evaluate(position)
    momentum = 0 * position[..., :columns]
    cloud = smc.initial_cloud(parts, position, momentum, found, jnp.zeros(()))
    kernel = kernel_of(parts, 1e-6, shift=-0.5)
    kept, _, info = smc.step(random.key(0), parts, cloud, kernel, evaluate, True)
    assert info.died == 0 and kept.position[0, 0] == position[0, 0]
    new, _, info = smc.step(random.key(0), parts, cloud, kernel, evaluate, False)
    log_weight = new.log_weight[0, 0]
    assert np.isneginf(log_weight[0]) and np.isfinite(log_weight[1:]).all()
    assert info.died == 1 and new.position[0, 0] == position[0, 0]
    assert np.isfinite(new.gradient).all() and (new.position != position)[0, 1:].all()


@pytest.mark.parametrize("broken", ["potential", "gradient"])
@pytest.mark.parametrize("columns", [3, 0])
def test_a_component_that_leaves_its_support_dies_alone(columns, broken):
    parts = partition(np.array([1, 0, 1]))

    def cliff(params, temperature, x):
        if broken == "gradient":  # of a root it is infinite at zero
            terms = jnp.where(x > 0, x, 0.0) ** 0.5 + x
        else:
            terms = jnp.where(x > 0, -jnp.log(x) + x, jnp.nan)
        return jnp.zeros(2).at[parts.owner].add(terms)

    target = Target(jnp.zeros(0), jnp.ones((1, 2)))
    evaluate = lambda x: evaluation.evaluate_model(cliff, parts, target, x, True)  # noqa: E731
    # Of the first particle the second component falls, of the last the first.
    position = jnp.array([[[2.0, 3.0, 0.01], [2.0, 2.0, 2.0], [1.0, 0.02, 3.0]]])
    momentum = 0 * position[..., :columns]
    found, _ = evaluate(position)
    cloud = smc.initial_cloud(parts, position, momentum, found, jnp.zeros(()))
    kernel = kernel_of(parts, 1e-6, shift=-0.5)
    new, _, info = smc.step(random.key(0), parts, cloud, kernel, evaluate, False)
    died = np.array([[False, False, True], [True, False, False]])
    np.testing.assert_array_equal(np.isneginf(new.log_weight[0]), died)
    assert np.isfinite(new.log_weight[0][~died]).all() and info.died == 2
    stays = (new.position == position)[0]
    np.testing.assert_array_equal(stays, died[parts.owner].T)
    for field in (new.potential, new.gradient, new.slope):
        assert np.isfinite(field).all()
    # Who starts outside is dead from the start, and has zeros for its derivatives.
    fallen, _ = evaluate(position - 0.5)
    start = smc.initial_cloud(parts, position - 0.5, momentum, fallen, jnp.zeros(()))
    np.testing.assert_array_equal(np.isneginf(start.log_weight[0]), died)
    assert (start.gradient[0][died[parts.owner].T] == 0).all()
    assert (start.gradient[0][~died[parts.owner].T] != 0).all()
    assert (start.potential[0][died] == 0).all()


def test_the_evidence_that_is_given_is_counted_once():
    found = evaluation.Derivatives(
        jnp.zeros((2, 3, 4)), jnp.zeros((2, 4, 6)), jnp.zeros((2, 3, 4)), jnp.zeros(0)
    )._replace(scores=jnp.zeros((2, 3, 4, 0)))
    rows = jnp.zeros((2, 4, 6))
    cloud = smc.initial_cloud(SEVERAL, rows, rows, found, jnp.asarray(-7.5))
    np.testing.assert_allclose(smc.log_evidence(cloud).sum(1), -7.5)


@pytest.mark.parametrize("parts", [JOINT, SEVERAL], ids=["one", "several"])
def test_no_key_is_used_twice(parts):
    factor = (FACTORS if parts.is_joint else BLOCKS)["dense"]
    with jax.debug_key_reuse(True):
        run = lambda key: run_steps(  # noqa: E731
            parts, key, factor, 0.1, jnp.zeros(2), 0.5, 0.8, 0.5
        )
        jax.jit(run)(random.key(0))


def test_momentum_carries_particles_as_far_as_the_dynamics_say():
    size, num_moves = 0.002, 32
    parts, target = joint(1), Target(jnp.zeros(0), jnp.ones((1, 1)))

    def bowl(params, temperature, x):
        return 0.5 * (x - 3.0) ** 2

    def evaluate(x):
        return evaluation.evaluate_model(bowl, parts, target, x, True)

    @jax.jit
    def wander(keys):
        position = 3.0 + random.normal(keys[0], (1, 20_000, 1))
        momentum = random.normal(keys[1], position.shape)
        found, _ = evaluate(position)
        cloud = smc.initial_cloud(parts, position, momentum, found, jnp.zeros(()))
        sizes = jnp.array([[size]])
        kernel = Kernel(sizes, IDENTITY, jnp.zeros((1, 1)), momentum_memory(sizes))
        cloud, _ = lax.scan(
            lambda here, key: (smc.step(key, parts, here, kernel, evaluate, True)[0], None),
            cloud,
            keys[2:],
        )
        return (position[0, :, 0] - 3.0) * (cloud.position[0, :, 0] - 3.0)

    product = wander(random.split(random.key(3), 2 + num_moves))
    # A spring with friction one: x'' + x' + x = 0, from x = 1 at rest on average.
    time, rate = num_moves * np.sqrt(2 * size), np.sqrt(0.75)
    left = np.exp(-time / 2) * (np.cos(rate * time) + np.sin(rate * time) / (2 * rate))
    assert left < 0.2  # without momentum it would be 0.94
    assert_mean(product, left, resolution=0.05)
