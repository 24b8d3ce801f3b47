"""The components of latents, against those worked out by hand and by derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from numpy.testing import assert_array_equal

from numpyro_jala.model.dependence import walk
from numpyro_jala.model.dependence.find import Components, confirm, find
from tests.model.dependence.models import MODELS, factors_of
from tests.model.dependence.programs import NUM_PARAMS, components_of, derivatives, program

POINTS = np.asarray(random.normal(random.key(0), (4, 4)))
SEED = 1


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_components_that_were_worked_out_by_hand(name):
    model, expected = MODELS[name]
    factors, params, position = factors_of(model)
    found = find(factors, params, position)
    assert_array_equal(found.coordinates, expected)
    positions = np.asarray(random.normal(random.key(1), (2, position.size)))
    assert confirm(factors, found, params, positions, SEED, num_directions=4)


MASK = np.array([True, False, True, False])
LOWER = np.array([[1.0, 0.0], [0.5, 1.0]], np.float32)

#: Functions of params p and a position z of four coordinates, and their components.
FUNCTIONS = {
    "no factor": (lambda p, z: {}, [0, 1, 2, 3]),
    "factors without latents": (lambda p, z: (p * 2, jnp.ones(3)), [0, 1, 2, 3]),
    "comparisons depend on both sides": (lambda p, z: z[0] > z[1], [0, 0, 1, 2]),
    "floor": (lambda p, z: jnp.floor(z[0] + z[3]), [0, 1, 2, 0]),
    "stopped gradients": (lambda p, z: z[0] * lax.stop_gradient(z[1]), [0, 0, 1, 2]),
    "only the start of a running sum": (lambda p, z: jnp.cumsum(z)[:2], [0, 0, 1, 2]),
    "only one of two columns": (lambda p, z: z.reshape(2, 2).sum(0)[0], [0, 1, 0, 2]),
    "masked before the sum": (lambda p, z: (z * MASK).sum(), [0, 1, 0, 2]),
    "masked after a product": (lambda p, z: jnp.where(MASK, z, z * z[0]), [0, 0, 1, 0]),
    "unknown index": (lambda p, z: z[jnp.int32(p)], [0, 0, 0, 0]),
    "unknown index into columns": (
        lambda p, z: z.reshape(2, 2)[jnp.int32(p)],
        [0, 1, 0, 1],
    ),
    "latent index into data": (lambda p, z: jnp.arange(9)[jnp.int32(z)], [0, 1, 2, 3]),
    "index moved into bounds": (
        lambda p, z: z[0] * z.at[jnp.array([9])].get(mode="clip"),
        [0, 1, 2, 0],
    ),
    "zeros of an unknown choice": (
        lambda p, z: jnp.where(p > 0, jnp.eye(4), jnp.eye(4)[::-1]) @ z,
        [0, 1, 1, 0],
    ),
    "unknown start": (
        lambda p, z: lax.dynamic_slice(
            z.reshape(2, 2), (jnp.int32(0), jnp.int32(p)), (2, 1)
        ),
        [0, 0, 1, 1],
    ),
    "unknown place of an update": (
        lambda p, z: lax.dynamic_update_slice(z[:2], z[3:], (jnp.int32(p),)),
        [0, 0, 1, 0],
    ),
    "repeated write": (lambda p, z: z.at[jnp.array([0, 0])].set(z[2:]), [0, 1, 2, 2]),
    "write that adds": (lambda p, z: z[:2].at[jnp.array([0, 0])].add(z[2:]), [0, 1, 0, 0]),
    "applied in place": (lambda p, z: z.at[0].apply(jnp.sin), [0, 1, 2, 3]),
    "two triangular systems": (
        lambda p, z: lax.linalg.triangular_solve(
            p * jnp.asarray(LOWER, z.dtype), z.reshape(2, 2), left_side=True, lower=True
        ),
        [0, 1, 0, 1],
    ),
    "batched cholesky": (
        lambda p, z: jnp.linalg.cholesky(z.reshape(2, 2)[:, :, None] * jnp.eye(2)),
        [0, 0, 1, 1],
    ),
    "batched linear systems": (
        lambda p, z: jax.vmap(lambda b: jnp.linalg.solve(p * LOWER, b))(z.reshape(2, 2)),
        [0, 0, 1, 1],
    ),
    "diagonal matrix of latents": (lambda p, z: jnp.diag(z[:2]) @ z[2:], [0, 1, 0, 1]),
    "batched product": (
        lambda p, z: jnp.einsum("bi,bi->b", z.reshape(2, 2), z.reshape(2, 2)),
        [0, 0, 1, 1],
    ),
    "sort by row": (lambda p, z: jnp.sort(z.reshape(2, 2), axis=1), [0, 0, 1, 1]),
    "top two by row": (lambda p, z: lax.top_k(z.reshape(2, 2), 1)[0], [0, 0, 1, 1]),
    "argmax": (lambda p, z: jnp.argmax(z[:3]), [0, 0, 0, 1]),
    "cast to bytes": (
        lambda p, z: lax.bitcast_convert_type(z.astype(jnp.float32), jnp.int8),
        [0, 0, 0, 0],
    ),
    "no rule": (lambda p, z: jnp.fft.fft(z[:2]).real, [0, 0, 1, 2]),
    "while": (
        lambda p, z: lax.while_loop(lambda s: s.sum() < 9, lambda s: s * 2, z[:2]),
        [0, 0, 1, 2],
    ),
    "branch on a latent": (
        lambda p, z: lax.cond(z[0] > 0, lambda x: x, lambda x: x * 2, z[1]),
        [0, 0, 1, 2],
    ),
    "known branch": (
        lambda p, z: lax.cond(jnp.array(True), lambda x: x, lambda x: x[::-1], z),
        [0, 1, 2, 3],
    ),
    "known counter of a long loop": (
        lambda p, z: lax.fori_loop(0, 400, lambda i, s: s.at[i % 4].mul(1.1), z),
        [0, 1, 2, 3],
    ),
    "random numbers": (lambda p, z: z + random.normal(random.key(0), (4,)), [0, 1, 2, 3]),
    "custom derivative": (lambda p, z: jax.nn.relu(z) + jax.nn.silu(z), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_components_that_were_worked_out_by_hand(name):
    function, expected = FUNCTIONS[name]
    found = find(function, 1.5, jnp.zeros(4))
    assert_array_equal(found.coordinates, expected)


def test_data_of_unknown_values_merge_what_their_values_could():
    """As arguments beside the params their values are not known, as constants they are."""
    group, x, z = jnp.array([0, 1, 1, 3]), jnp.array([1.0, 0.0, 0.0, 0.0]), jnp.zeros(4)

    def effects(data, z):
        group, x = data
        return z[group] * x, z**2

    assert_array_equal(find(effects, (group, x), z).coordinates, [0, 0, 0, 0])
    known_group = find(lambda x, z: effects((group, x), z), x, z)
    assert_array_equal(known_group.coordinates, [0, 1, 2, 3])

    def mirrored(x, z):
        return x * (z[::-1] + z)

    # Only zeros that are known take a product out.
    assert_array_equal(find(mirrored, x, z).coordinates, [0, 1, 1, 0])
    known_zeros = find(lambda _, z: mirrored(x, z), (), z)
    assert_array_equal(known_zeros.coordinates, [0, 1, 2, 0])


def test_factors_bear_the_number_of_their_component():
    def function(params, position):
        return {"a": position[::-1], "b": params, "c": [position[:2].sum()]}

    found = find(function, jnp.ones(2), jnp.zeros(4))
    assert_array_equal(found.coordinates, [0, 0, 1, 2])
    assert_array_equal(found.factors["a"], [2, 1, 0, 0])
    assert_array_equal(found.factors["b"], [-1, -1])
    assert_array_equal(found.factors["c"][0], 0)


@pytest.mark.parametrize("name", [name for name in MODELS if "scanned" in name])
def test_long_loops_are_labelled_in_all_iterations_at_once(name, monkeypatch):
    monkeypatch.setattr(walk, "MAX_UNROLLED", 0)
    model, expected = MODELS[name]
    assert_array_equal(find(*factors_of(model)).coordinates, expected)


def carried(mix):
    """Return the last carry of a loop with two entries in its carry."""
    return lambda p, z: lax.scan(
        lambda c, x: (mix(c) + x, c), jnp.zeros(2), z.reshape(2, 2)
    )


@pytest.mark.parametrize(
    "mix, short, long",
    [(jnp.sin, [0, 1, 0, 1], [0, 1, 0, 1]), (jnp.flip, [0, 1, 1, 0], [0, 0, 0, 0])],
)
def test_entries_of_a_carry_stay_apart_unless_they_are_mixed(mix, short, long, monkeypatch):
    assert_array_equal(find(carried(mix), 1.5, jnp.zeros(4)).coordinates, short)
    monkeypatch.setattr(walk, "MAX_UNROLLED", 0)
    assert_array_equal(find(carried(mix), 1.5, jnp.zeros(4)).coordinates, long)


def is_equal(seed):
    """Compare a random program with its derivatives; finer components are an error."""
    factors, dim = program(seed)
    found = find(factors, jnp.zeros(NUM_PARAMS), jnp.zeros(dim))
    depends = derivatives(factors, dim)
    labels = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(found.factors)])
    outside = depends & (labels[:, None] != found.coordinates)
    assert not outside.any(), f"a factor of program {seed} depends on another component"
    return np.array_equal(found.coordinates, components_of(depends))


# In groups, which can run side by side.
@pytest.mark.parametrize("group", range(6))
def test_random_programs_agree_with_their_derivatives(group):
    seeds = range(40 * group, 40 * (group + 1))
    assert np.mean([is_equal(seed) for seed in seeds]) >= 0.95


def test_long_loops_in_random_programs_are_never_labelled_too_finely(monkeypatch):
    monkeypatch.setattr(walk, "MAX_UNROLLED", 0)
    assert np.mean([is_equal(seed) for seed in range(1_000, 1_040)]) >= 0.8


PAIRS = [0, 0, 1, 1]


def paired(params, position):
    return params * position[::2] * position[1::2], position**2, params


def test_confirm_accepts_what_find_found():
    found = find(paired, 1.5, POINTS[0])
    assert_array_equal(found.coordinates, PAIRS)
    assert confirm(paired, found, 1.5, POINTS, SEED)


@pytest.mark.parametrize("seed", range(5))
def test_confirm_rejects_a_component_that_was_split(seed):
    split = Components(
        np.array([0, 1, 2, 2]), (np.array([0, 2]), np.array([0, 1, 2, 2]), np.array(-1))
    )
    assert not confirm(paired, split, 1.5, POINTS, seed)


def test_confirm_rejects_a_factor_that_is_said_to_depend_on_nothing():
    found = find(paired, 1.5, POINTS[0])
    first, second, third = found.factors
    wrong = Components(found.coordinates, (np.array([-1, 1]), second, third))
    assert not confirm(paired, wrong, 1.5, POINTS, SEED)


def test_confirm_looks_past_factors_that_are_not_finite():
    def function(params, position):
        return jnp.log(-jnp.abs(position)) + jnp.where(position > 1e6, position[0], 0.0)

    apart = Components(np.arange(4), np.arange(4))
    assert confirm(function, apart, (), POINTS, SEED)
