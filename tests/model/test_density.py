import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints

from numpyro_jala import JALAEM
from numpyro_jala.model.arguments import split_call
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once


def laid_out(model, *args):
    layout = lay_out(model, run_once(model, random.key(0), args, {}), args, {})
    arrays = split_call(args, {}, False)[1] if None in layout.call.frozen else []
    return layout, arrays


def mixed(y=None):
    """A dynamic support, a constrained param, a factor, a scaled and a masked site."""
    top = numpyro.param("top", 3.0, constraint=constraints.greater_than(1.0))
    slope = numpyro.param("slope", jnp.array([0.5, -1.0]))
    a = numpyro.sample("a", dist.Uniform(0, top))
    b = numpyro.sample("b", dist.Exponential(2.0))
    numpyro.deterministic("ratio", a / top)
    numpyro.factor("extra", -0.3 * a * b)
    with numpyro.handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(slope[0] * a + slope[1] * b, 1.0), obs=y)


DATA = jnp.array([0.3, 1.2])
POSITIVE = constraints.positive


def by_hand(top, slope, temperature, a, b):
    """The joint density on the unconstrained scale, written out."""
    share = a / top
    prior = -jnp.log(top) + jnp.log(2.0) - 2 * b
    jacobian = jnp.log(top) + jnp.log(share) + jnp.log1p(-share) + jnp.log(b)
    mean = slope[0] * a + slope[1] * b
    normal = -0.5 * (DATA - mean) ** 2 - 0.5 * jnp.log(2 * jnp.pi)
    return prior + jacobian + temperature * (2 * normal.sum() - 0.3 * a * b)


def test_temperature_spares_the_prior_and_its_jacobians():
    layout, arrays = laid_out(mixed, DATA)
    potential = layout.joint(arrays)
    values = {"top": jnp.array(2.5), "slope": jnp.array([0.1, 0.7])}
    params = layout.unconstrain_params(values)
    for a, b, temperature in ((0.4, 0.2, 0.0), (1.9, 1.3, 0.37), (2.2, 0.1, 1.0)):
        position = layout.unconstrain(params, {"a": a, "b": jnp.array(b)}, arrays)
        expected = -by_hand(2.5, values["slope"], temperature, a, b)
        found = potential(params, jnp.asarray(temperature), position)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_support_that_depends_on_a_param_follows_it():
    layout, arrays = laid_out(mixed, DATA)
    for top in (1.5, 40.0):
        params = layout.unconstrain_params({"top": jnp.array(top), "slope": jnp.zeros(2)})
        found = layout.constrain(random.key(0), params, jnp.array([8.0, 0.0]), arrays)
        np.testing.assert_allclose(found["a"], top, rtol=1e-2)
        np.testing.assert_allclose(found["ratio"], found["a"] / top, rtol=1e-5)


def test_params_go_there_and_back():
    layout, _ = laid_out(mixed, DATA)
    values = {"top": jnp.array(7.0), "slope": jnp.array([2.0, -3.0])}
    back = layout.constrain_params(layout.unconstrain_params(values))
    for name, value in values.items():
        np.testing.assert_allclose(back[name], value, rtol=1e-5)
    np.testing.assert_array_equal(layout.is_free, [True, True, False])


def test_a_coordinate_is_free_where_its_param_is_linear_in_it():
    def model(y):
        numpyro.param("a", jnp.eye(2), constraint=constraints.lower_cholesky)
        numpyro.param("b", jnp.zeros(2), constraint=constraints.real_vector)
        numpyro.param("c", jnp.arange(3.0), constraint=constraints.ordered_vector)
        numpyro.sample("y", dist.Normal(numpyro.sample("x", dist.Normal()), 1.0), obs=y)

    layout = lay_out(model, run_once(model, random.key(0), (1.0,), {}), (1.0,), {})
    expected = [True, False, False, True, True, True, False, False]
    np.testing.assert_array_equal(layout.is_free, expected)


def test_prior_draws_have_the_prior_density():
    layout, arrays = laid_out(mixed, DATA)
    params = layout.init_params
    keys = random.split(random.key(0), 20_000)
    draws = jax.vmap(lambda key: layout.draw_prior(key, params, arrays))(keys)
    a = 3.0 * jax.nn.sigmoid(draws[:, 0])
    np.testing.assert_allclose(a.mean(), 1.5, atol=0.03)
    np.testing.assert_allclose(jnp.exp(draws[:, 1]).mean(), 0.5, atol=0.02)


def test_a_model_that_looks_at_values_is_compiled_with_them():
    def model(group, y=None):
        with numpyro.plate("groups", int(np.max(group)) + 1):
            x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x[group], 1.0), obs=y)

    layout, arrays = laid_out(model, np.array([0, 1, 2, 2]), np.zeros(4))
    assert layout.dim == 3 and not arrays
    again, _ = laid_out(model, np.array([0, 1, 2, 2]), np.zeros(4))
    assert layout.call == again.call
    other, _ = laid_out(model, np.array([0, 1, 2, 1]), np.zeros(4))
    assert layout.call != other.call


def test_params_that_are_drawn_start_where_this_run_drew_them():
    def model(y):
        a = numpyro.param("a", lambda key: random.normal(key, (2,)))
        b = numpyro.param("b", lambda key: random.gamma(key, 2.0), constraint=POSITIVE)
        x = numpyro.sample("x", dist.Normal(a.sum(), b))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    jala = JALAEM(model)
    starts = []
    for seed in (0, 1):
        fixed, _, trace = jala._inspect(random.key(seed), (DATA,), {})
        first = jala._first_params(fixed.layout, trace, {"b": jnp.array(3.0)})
        values = fixed.layout.constrain_params(first)
        np.testing.assert_allclose(values["a"], trace["a"]["value"], rtol=1e-6)
        np.testing.assert_allclose(values["b"], 3.0, rtol=1e-6)
        starts.append(values["a"])
    assert (starts[0] != starts[1]).all() and len(jala._fixed) == 1
