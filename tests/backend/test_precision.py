"""Matrix products are exact to float32, whatever the device's default is."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random

from numpyro_jala import JALAEM, PGD
from numpyro_jala.backend.precision import (
    HIGHEST,
    THREE_PASSES,
    choose,
    exactly,
    roughly,
    total,
)
from numpyro_jala.engine import evaluation, sampler
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import estimation, programs
from numpyro_jala.inference.snapshots import take

MANY = jnp.zeros(1_024)


def chosen(potential, position=MANY, platform="gpu"):
    jaxpr = jax.make_jaxpr(potential)(jnp.zeros(0), jnp.ones(1), position).jaxpr
    return choose(platform, jaxpr, position.size)


def network(params, temperature, x):
    layers = x.reshape(2, 16, 32)
    return temperature * jnp.sum((layers[0] @ layers[1].T) ** 2)


def scanned(params, temperature, x):
    def body(total, row):
        return total + row @ row, None

    return lax.scan(body, 0.0, x.reshape(32, 32))[0]


def convolved(params, temperature, x):
    image = x.reshape(1, 1, 32, 32)
    return jnp.sum(lax.conv(image, image[..., :3, :3], (1, 1), "SAME"))


def counted(params, temperature, x):
    def body(total, row):
        counts = row.astype(int)
        return total + counts @ counts, None

    return lax.scan(body, 0, x.reshape(32, 32))[0].astype(float)


def test_three_passes_serve_large_products_on_a_gpu_alone():
    assert chosen(network) == chosen(scanned) == THREE_PASSES
    assert chosen(network, platform="cpu") == HIGHEST
    assert chosen(network, platform="tpu") == HIGHEST
    assert chosen(lambda p, t, x: x @ x, jnp.zeros(999)) == HIGHEST


@pytest.mark.parametrize("potential", [convolved, counted])
def test_what_three_passes_cannot_do_is_left_to_the_highest(potential):
    assert chosen(potential) == HIGHEST


def regression(x, y):
    scale = numpyro.param("scale", 1.0)
    w = numpyro.sample("w", dist.Normal(jnp.zeros(3), scale).to_event(1))
    numpyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def products(jaxpr):
    """Return the precisions of all matrix products, by whether they touch the data."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            shapes = [v.aval.shape for v in equation.invars]
            yield any(11 in shape for shape in shapes), str(equation.params["precision"])
        leaves = jax.tree.leaves(equation.params, is_leaf=lambda v: hasattr(v, "eqns"))
        for value in leaves:
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from products(getattr(value, "jaxpr", value))


DATA = np.arange(33.0).reshape(11, 3) / 33, np.linspace(-1, 1, 11)


def precisions_in(step_fn, state):
    """Return the precisions in a step, of products with data (11 rows) and without."""
    with jax.default_matmul_precision("bfloat16"):
        found = set(products(jax.make_jaxpr(step_fn)(state).jaxpr))
    return {p for is_data, p in found if is_data}, {
        p for is_data, p in found if not is_data
    }


def precisions_of(jala):
    state = jala.init(random.key(0), *DATA)
    problem, settings = jala._problem(DATA, {})
    stage = jnp.asarray(EM_STEP)
    goal = state.target.params
    return precisions_in(
        lambda s: sampler.step(problem, settings, s, stage, goal, stage), state
    )


def test_a_step_is_exact_whatever_the_default():
    with_data, without = precisions_of(JALAEM(regression, num_particles=32))
    assert with_data == without == {"(Precision.HIGHEST, Precision.HIGHEST)"}


def test_what_is_found_at_rest_is_exact_whatever_the_default():
    jala = JALAEM(regression, num_particles=32)
    state = jala.init(random.key(0), *DATA)
    fixed, arrays, _ = jala._inspect(random.key(0), DATA, {})
    data, params = programs.Data(arrays, None), state.target.params

    def bridge(s):
        clouds = [take(s.cloud, fixed.layout.partition)]
        fitted = estimation.fit_loo(fixed, clouds)
        return estimation.bridge_to(fixed, s.rng_key, data, params, clouds, *fitted)

    def louis(s):
        cloud = take(s.cloud, fixed.layout.partition)
        return estimation.louis(fixed, data, params, cloud, jnp.asarray(True))

    def start(s):
        return programs.initial_state(fixed, s.rng_key, data, params).cloud

    for stage in (bridge, louis, start):
        with_data, without = precisions_in(stage, state)
        exact = {"(Precision.HIGHEST, Precision.HIGHEST)"}
        assert with_data == exact and without <= exact


def test_the_user_can_choose_the_precision_of_the_model():
    jala = JALAEM(regression, num_particles=32, matmul_precision="tensorfloat32")
    with_data, without = precisions_of(jala)
    assert with_data == {"(Precision.HIGH, Precision.HIGH)"}
    assert without == {"(Precision.HIGHEST, Precision.HIGHEST)"}


def test_algorithms_without_evidence_keep_the_default():
    with jax.default_matmul_precision("tensorfloat32"):
        baseline = PGD(regression, step_size=0.1, num_particles=4)
    problem, _ = baseline._problem(DATA, {})
    with_data, _ = precisions_in(
        lambda x: problem.potential_fn(jnp.ones(1), jnp.ones(1), x), jnp.ones(3)
    )
    assert with_data == {"(Precision.HIGH, Precision.HIGH)"}


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="matmul_precision='exact' is not one that JAX"):
        JALAEM(regression, matmul_precision="exact")


def test_only_gradients_may_be_rough():
    """On a GPU: the products of the potential in three passes, those of its gradient not."""
    jala = JALAEM(regression, num_particles=32, matmul_precision=THREE_PASSES)
    problem, _ = jala._problem(DATA, {})
    target = Target(jnp.ones(1), jnp.ones((2, 1)))

    def evaluate(position, rough):
        arguments = problem.potential_fn, problem.partition, target, position
        return evaluation.evaluate_model(*arguments, True, rough_gradient=rough)[0]

    def found(rough):
        jaxpr = jax.make_jaxpr(lambda x: evaluate(x, rough))(jnp.zeros((2, 4, 3)))
        return [precision for with_data, precision in products(jaxpr.jaxpr) if with_data]

    exact, rough = found(False), found(True)
    assert len(exact) == len(rough) == 2
    assert set(exact) == {"BF16_BF16_F32_X3"} and sorted(rough)[1] == "None"
    assert sorted(rough)[0] == "BF16_BF16_F32_X3"


def test_roughly_changes_nothing_but_precision():
    def function(tree, scale):
        def body(total, row):
            return total + jnp.tanh(row @ tree["w"]).sum(), row @ tree["w"]

        last, rows = lax.scan(body, 0.0, tree["x"])
        return {"last": scale * last, "rows": rows}

    rng = np.random.default_rng(0)
    tree = {"x": jnp.asarray(rng.normal(size=(4, 3))), "w": jnp.asarray(rng.normal(size=3))}
    with jax.default_matmul_precision("highest"):
        exact = function(tree, 2.0)
        rough = jax.jit(roughly(function))(tree, 2.0)
        jaxpr = jax.make_jaxpr(roughly(function))(tree, 2.0)
    assert {precision for _, precision in products(jaxpr.jaxpr)} == {"None"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), exact, rough)


def test_exactly_keeps_the_name_and_ends():
    @exactly
    def multiply(a):
        return a @ a

    before = jax.config.jax_default_matmul_precision
    jaxpr = jax.make_jaxpr(multiply)(jnp.eye(2))
    assert {p for _, p in products(jaxpr.jaxpr)} == {
        "(Precision.HIGHEST, Precision.HIGHEST)"
    }
    assert multiply.__name__ == "multiply"
    assert jax.config.jax_default_matmul_precision == before


@pytest.mark.parametrize("is_traced", [False, True])
def test_sums_of_very_many_lose_no_digit(is_traced):
    rng = np.random.default_rng(0)
    first = np.float32(rng.normal(300.0, 200.0, size=(3, 40_001)))
    second = np.float32(rng.normal(-156.0, 150.0, size=77_003))
    exact = first.astype(float).sum(1) + second.astype(float).sum()
    add = jax.jit(total) if is_traced else total
    found = np.asarray(add(jnp.asarray(first), jnp.asarray(second)), float)
    # Twelve millions less as much: on the way one rounding is of the order of one.
    rounding = np.finfo(np.float32 if is_traced else float).eps
    np.testing.assert_allclose(found, exact, rtol=rounding, atol=1e-6)
    plain = jnp.sum(first, 1) + jnp.sum(second)
    assert np.abs(plain - exact).max() > 0.1
