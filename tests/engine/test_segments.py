import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine.segments import Segments

#: Segments 1 and 6 (the last) are empty, and the longest has five times the shortest.
OWNER = np.array([3, 0, 0, 4, 2, 3, 0, 5, 0, 4, 0, 2])
SEGMENTS = Segments(7, OWNER)
ENTRIES = random.normal(random.key(0), (12,))


def by_scatter(entries):
    return jax.ops.segment_sum(entries, OWNER, 7)


def total_of_squares(total, entries):
    """A function with curvature, also between the entries of a segment."""
    sums = total(jnp.sin(entries))
    return jnp.sum(jnp.arange(1.0, 8.0) * sums**2 + jnp.exp(0.3 * sums))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit])
def test_totals_are_those_of_a_scatter_and_of_empty_segments_zero(how):
    found = how(SEGMENTS.total)(ENTRIES)
    close(found, by_scatter(ENTRIES))
    assert found[1] == found[6] == 0


def test_rows_are_summed_each_by_itself():
    rows = random.normal(random.key(1), (3, 2, 12))
    close(SEGMENTS.total(rows), jax.vmap(jax.vmap(by_scatter))(rows))


def test_entries_have_the_value_of_their_segment():
    sums = random.normal(random.key(1), (3, 7))
    for how in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(how(SEGMENTS.spread)(sums), sums[:, OWNER])


def test_entries_in_order_and_segments_of_one():
    for owner in (np.arange(12) // 4, np.arange(12), np.zeros(12, int)):
        count = owner.max() + 1
        found = Segments(count, owner).total(ENTRIES)
        close(found, jax.ops.segment_sum(ENTRIES, owner, count))


def test_without_entries_all_segments_are_zero():
    empty = Segments(4, np.zeros(0, int))
    np.testing.assert_array_equal(empty.total(jnp.zeros((2, 0))), np.zeros((2, 4)))


@pytest.mark.parametrize("mode", ["grad", "jvp", "hessian", "vmap", "linear transpose"])
def test_derivatives_are_those_of_a_scatter(mode):
    def derive(total):
        function = lambda x: total_of_squares(total, x)  # noqa: E731
        along = random.normal(random.key(2), ENTRIES.shape)
        if mode == "grad":
            return jax.grad(function)(ENTRIES)
        if mode == "jvp":
            return jax.jvp(function, (ENTRIES,), (along,))[1]
        if mode == "hessian":
            return jax.jit(jax.hessian(function))(ENTRIES)
        if mode == "linear transpose":
            return jax.linear_transpose(total, ENTRIES)(jnp.arange(7.0))[0]
        rows = random.normal(random.key(3), (12, 4))
        return jax.jit(jax.vmap(jax.grad(function), in_axes=1, out_axes=1))(rows)

    close(derive(SEGMENTS.total), derive(by_scatter))


def test_derivatives_of_a_spread_are_those_of_indexing():
    sums = random.normal(random.key(1), (7,))

    def derive(spread):
        function = lambda s: jnp.sum(jnp.sin(spread(s)) * jnp.arange(12.0))  # noqa: E731
        rows = jnp.stack([sums, 2 * sums], 1)
        return (
            jax.grad(function)(sums),
            jax.hessian(function)(sums),
            jax.vmap(jax.grad(function), in_axes=1)(rows),
        )

    for found, expected in zip(
        derive(SEGMENTS.spread), derive(lambda s: s[OWNER]), strict=True
    ):
        close(found, expected)


def test_no_derivative_is_a_scatter():
    function = lambda x: total_of_squares(SEGMENTS.total, x)  # noqa: E731
    for derive in (jax.grad(function), jax.hessian(function)):
        assert "scatter" not in jax.jit(derive).lower(ENTRIES).as_text()
    plain = jax.grad(lambda x: total_of_squares(by_scatter, x))
    assert "scatter" in jax.jit(plain).lower(ENTRIES).as_text()


def test_an_index_that_is_an_argument_is_not_in_the_program():
    large = Segments(500, np.random.default_rng(0).permutation(np.arange(3_000) % 500))
    entries = random.normal(random.key(1), (3_000,))
    index = [jnp.asarray(each) for each in large.index]

    def derive(x, given):
        return jax.value_and_grad(lambda v: jnp.sum(large.total(jnp.sin(v), given) ** 2))(x)

    held, given = (jax.jit(derive).lower(entries, each) for each in (None, index))
    assert len(given.as_text()) < len(held.as_text()) / 2
    for found, expected in zip(derive(entries, index), derive(entries, None), strict=True):
        np.testing.assert_array_equal(found, expected)
