"""Particles block by block: the same numbers, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random

from numpyro_jala import JALAEM
from numpyro_jala.backend import blocks
from numpyro_jala.engine import evaluation, planner, transport
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import programs
from tests.tools import SCHOOLS, normal_means, normal_means_log_likelihood

WIDE = random.normal(random.key(0), (300, 3))


def wide(params, temperature, x):
    """Make an array of 300 numbers of each particle, and of its data one of 900."""
    residual = (2 * WIDE) @ (x + 0.3 * x**2) - params[0]
    return temperature * jnp.sum(jnp.exp(0.1 * residual)) + jnp.sum(x**2) * params[1]


def wide_apart(params, temperature, x):
    """Each coordinate by itself, a component each."""
    residual = 2 * WIDE * (x + 0.3 * x**2) - params[0]
    return temperature * jnp.sum(jnp.exp(0.1 * residual), 0) + x**2 * params[1]


JOINT, APART = (joint(3), wide), (partition(np.array([1, 2, 0])), wide_apart)


def width_of(potential):
    at = jnp.ones(2), jnp.ones(1), jnp.ones(3)
    return blocks.widest(jax.make_jaxpr(potential)(*at).jaxpr)


@pytest.fixture
def cloud():
    return jnp.array([0.5, 1.5]), random.normal(random.key(1), (2, 11, 3))


def test_the_width_is_that_of_what_particles_do_not_share():
    assert width_of(wide) == 300 * 4
    assert width_of(jax.jit(wide)) == 300 * 4
    shared = jax.jit(lambda data, x: (jnp.outer(data[0], data[1]).sum() + data) @ x)
    assert width_of(lambda params, heat, x: shared(WIDE, x).sum()) == 300 * 4


def test_a_loop_over_particles_makes_no_blocks():
    def walk(params, temperature, x):
        return lax.scan(lambda total, row: (total + row @ x, None), 0.0, WIDE)[0]

    def shared_walk(params, temperature, x):
        shared = lax.scan(lambda total, row: (total + row, None), 0.0, WIDE[0])[0]
        return shared * jnp.sum(WIDE @ x)

    assert width_of(walk) == 0 and width_of(jax.jit(walk)) == 0
    assert width_of(shared_walk) > 0


def test_without_a_product_of_matrices_there_are_no_blocks():
    assert width_of(lambda params, heat, x: jnp.sum(WIDE * x)) == 0
    shared = lambda params, heat, x: jnp.sum((WIDE.T @ WIDE) * x)  # noqa: E731
    assert width_of(shared) == 0


def test_wide_particles_make_small_blocks(monkeypatch):
    few, many = (blocks.num_particles(width, 8, 10**6) for width in (10_000, 1_000))
    assert 1 <= few < many
    assert blocks.num_particles(1_000, 1, 10**7) == pytest.approx(8 * many, rel=0.1)
    assert blocks.num_particles(10_000, 1_000, 10**6) == 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert blocks.num_particles(1_000, 8, 10**6) is None


def test_what_fits_is_evaluated_at_once():
    assert blocks.num_particles(0, 8, 10**9) is None
    assert blocks.num_particles(1_000, 8, 100) is None
    assert blocks.num_particles(1_000, 8, 10**6) is not None
    assert blocks.num_particles(10**9, 8, 10**6) is None


@pytest.mark.parametrize("problem", [JOINT, APART], ids=["one", "several"])
@pytest.mark.parametrize("most", [1, 4, 6, 10, 11])
def test_blocks_give_what_all_at_once_give(most, cloud, problem):
    (partition_, potential), (params, position) = problem, cloud
    num_components = partition_.num_components
    temperature = jnp.array([[0.3, 0.7, 0.1], [1.0, 0.2, 0.5]])[:, :num_components]
    target = Target(params, temperature)

    def evaluate(block):
        return evaluation.evaluate_model(
            potential, partition_, target, position, True, block=block
        )

    whole, whole_fn = evaluate(None)
    parts, parts_fn = evaluate(most)
    for one, other in zip(whole, parts, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-4)
    weight = random.uniform(random.key(2), (2, num_components, 11))
    np.testing.assert_allclose(whole_fn(weight), parts_fn(weight), rtol=1e-4)
    scores = [
        evaluation.evaluate_scores(potential, target, position, block)[1]
        for block in (None, most)
    ]
    np.testing.assert_allclose(*scores, rtol=2e-5, atol=1e-4)
    if problem is JOINT:
        np.testing.assert_allclose(scores[0], whole.scores, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("most", [1, 4, 6, 10, 11])
def test_what_fills_a_block_up_adds_nothing(most):
    weight, values = random.uniform(random.key(3), (2, 2, 11))
    mean = blocks.total(lambda w, v: jnp.sum(w * v), most, weight, 1 + values)
    assert mean == pytest.approx(float(jnp.sum(weight * (1 + values))), rel=1e-5)


def test_blocks_take_less_memory():
    target = Target(jnp.array([0.5, 1.5]), jnp.ones((2, 1)))

    def memory(block):
        evaluate = jax.jit(
            lambda x: evaluation.evaluate_model(
                wide, JOINT[0], target, x, True, block=block
            )[0]
        )
        shape = jax.ShapeDtypeStruct((2, 5_000, 3), jnp.float32)
        return evaluate.lower(shape).compile().memory_analysis().temp_size_in_bytes

    assert memory(50) < memory(None) / 5


@pytest.mark.parametrize("most", [None, 5])
def test_the_curvature_of_a_normal_mean_is_its_precision(most):
    jala = JALAEM(normal_means, num_particles=64, num_islands=4)
    fixed, arrays, _ = jala._inspect(random.key(0), (SCHOOLS,), {})
    data = programs.Data(arrays, None)
    state = programs.initial_state(fixed, random.key(1), data, fixed.layout.init_params)
    problem = programs.problem_of(fixed, data)._replace(block=most)
    still = transport.none(state.cloud, state.cloud.rates)
    found = planner._curvature(problem, state, normalise(state.cloud.log_weight), still)
    assert found[0, 0] == pytest.approx(6 / 0.5**2, rel=1e-4)  # six means, their sd 0.5


def test_a_fit_in_blocks_is_right(monkeypatch):
    asked = []

    def five(width, num_islands, size):
        asked.append((num_islands, size))
        return 5

    monkeypatch.setattr(blocks, "num_particles", five)
    jala = JALAEM(normal_means, num_particles=256, num_islands=4)
    jala.run(random.key(0), 40, SCHOOLS, progress_bar=False)
    assert set(asked) == {(4, 64), (1, 64)}  # the latter for a look in double precision
    assert programs.problem_of(jala._run.fixed, jala._run.data).block == 5
    exact = normal_means_log_likelihood(jala.params)
    assert jala.log_evidence_se < 0.05
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se
    assert jala.params["mu"] == pytest.approx(SCHOOLS.mean(), abs=0.05)
