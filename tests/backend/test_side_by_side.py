"""Loops whose turns are taken side by side, beside the loops themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_jala.backend.side_by_side import side_by_side

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)), jnp.float32)
DATA = jnp.asarray(np.random.default_rng(1).normal(size=6), jnp.float32)


def lags(scale, x):
    """What a turn hands on is handed on once more: two turns back count."""

    def body(carry, row):
        last, before = carry
        return (row[0], last), scale * jnp.tanh(last) + before**2 * row[1]

    (last, before), out = lax.scan(body, (scale, 0.5), x)
    return jnp.sum(jnp.arange(1.0, 7.0) * out) + last * before


def by_index(scale, x):
    """Latents are read by the number of the turn, as NumPyro does, and data as they come."""

    def body(carry, y):
        i, last, held = carry
        return (i + 1, x[i, 0], held), held * (x[i, 1] - last) ** 2 * y + i

    (i, last, _), out = lax.scan(body, (0, 1.5, scale), DATA)
    return jnp.sum(out * jnp.arange(6.0)) + i * last


def by_own_index(scale, x):
    """The user counts the turns, and reads both what does and what does not take turns."""

    def body(last, i):
        return x[i, 1], scale * x[i, 0] * last + x[2, 1] * DATA[i]

    return jnp.sum(lax.scan(body, x[5, 0], jnp.arange(6))[1] ** 2)


def back(scale, x):
    """From the last row to the first, the carry being a vector."""

    def body(carry, row):
        i, last = carry
        return (i + 2, scale * row), (jnp.sin(last) @ row) * i

    (_, last), out = lax.scan(body, (3, x[0] * x[1]), x, reverse=True)
    return out @ jnp.arange(1.0, 7.0) + last[0]


def ahead(scale, x):
    """Entries are read, but not those of a turn's own number."""

    def body(i, row):
        return i + 1, row[0] * x[(i + 2) % 6, 1] * scale

    return jnp.sum(lax.scan(body, jnp.asarray(0), x)[1] ** 2)


def in_other_ways(scale, x):
    """Two rows at a time, rows ahead, columns, a diagonal, and beyond the end."""
    wide, short = x.T, x[:4, 1]

    def body(i, row):
        rows = lax.dynamic_slice(x, (i, 0), (2, 2)).sum() + x[i + 1, 0] * scale
        return i + 1, rows * wide[0, i] + (wide[:, i] @ row) * short[i]

    def diagonal(i, row):
        return i + 1, x[i, i] * row

    first = lax.scan(body, 0, x)[1] @ jnp.arange(6.0)
    return first + lax.scan(diagonal, 0, x[:2, 0])[1] @ DATA[:2]


def in_pairs(scale, x):
    """Integers that are no numbers of turns, of which each turn has two."""
    pairs = jnp.asarray([[0, 1], [2, 2], [5, 4]])
    table = lax.broadcasted_iota(jnp.float32, (3, 2), 1)

    def body(last, pair):
        return row_of(pair), x[(pair + pair) % 6, 0] * scale + last

    def row_of(pair):
        return table[pair[1] - pair[0] % 2] * x[0]

    return jnp.sum(lax.scan(body, x[1], pairs)[1] ** 2)


def in_parts(scale, x):
    """What is summed up along the way is not wanted; two loops and what lies between."""

    def body(carry, row):
        total, last = carry
        return (total + row[0], row[1]), scale * last

    _, first = lax.scan(body, (0.0, 1.0), x)
    _, second = lax.scan(body, (0.0, first[2]), x * first[:, None])
    return jnp.sum(first * second)


def bent(scale, x):
    """A function that brings its own derivative, which is not that of its program."""

    @jax.custom_jvp
    def twice(value):
        return 2 * value

    twice.defjvp(lambda primals, tangents: (2 * primals[0], 5 * tangents[0]))

    def body(last, row):
        return row[0], twice(last) * row[1]

    return jnp.sum(lax.scan(body, scale, x)[1])


def numbers(scale, x):
    """Literals and numbers of turns among the results."""

    def body(i, row):
        return i + 1, (1.0, i, row @ row)

    i, (ones, counts, squares) = lax.scan(body, 4, x)
    return scale * jnp.sum(ones * counts * squares) + i


def adds_up(scale, x):
    def body(total, row):
        return total + scale * row[0] ** 2, total * row[1]

    return jnp.sum(lax.scan(body, 0.0, x)[1])


def chooses(scale, x):
    def body(last, row):
        return row[0], lax.cond(row[1] > 0, lambda: jnp.log(row[1]), lambda: last * scale)

    return jnp.sum(lax.scan(body, 1.0, x)[1])


WAITS = (adds_up, chooses)
SERVES = (
    lags,
    by_index,
    by_own_index,
    in_other_ways,
    in_pairs,
    back,
    ahead,
    in_parts,
    bent,
    numbers,
)


def primitives(function, *arguments):
    return {e.primitive.name for e in jax.make_jaxpr(function)(*arguments).jaxpr.eqns}


@pytest.mark.parametrize("function", SERVES + WAITS, ids=lambda each: each.__name__)
def test_a_loop_and_its_turns_side_by_side_agree_with_their_derivatives(function):
    scale = jnp.float32(0.7)
    other = side_by_side(function)
    assert ("scan" in primitives(other, scale, X)) == (function in WAITS)
    both = [
        jax.jit(jax.value_and_grad(each, (0, 1)))(scale, X) for each in (function, other)
    ]
    for one, two in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_what_each_turn_reads_in_turn_is_read_at_once():
    """Else each derivative would be written entry by entry."""
    for function in (by_index, by_own_index):
        found = primitives(side_by_side(function), jnp.float32(0.7), X)
        assert not found & {"gather", "dynamic_slice"}
    assert "gather" in primitives(side_by_side(ahead), jnp.float32(0.7), X)


def test_numbers_that_no_loop_goes_over_are_not_held_by_a_program():
    def function(x):
        shifted = lax.scan(lambda last, row: (row, last), 0.0, x)[1]
        return jnp.sum(shifted * jnp.arange(6.0)) + jnp.sum(lax.iota(jnp.int32, 9))

    program = jax.make_jaxpr(side_by_side(function))(DATA)
    assert not program.consts
    assert "scan" not in primitives(side_by_side(function), DATA)


def test_a_loop_that_saves_much_memory_stays_a_loop():
    def function(x):
        def body(last, row):
            return row, jnp.exp(last * jnp.ones((300, 300))).sum()

        return jnp.sum(lax.scan(body, 0.0, x)[1])

    small, large = jnp.ones(2), jnp.ones(3)  # of 360,000 bytes each
    assert "scan" not in primitives(side_by_side(function), small)
    assert "scan" in primitives(side_by_side(function), large)


def with_keys(x):
    """Random keys, which have a type of their own, among what turns take."""
    keys = jax.random.split(jax.random.key(0), 6)

    def body(carry, each):
        return (carry[0], each[1]), carry[1] * jax.random.normal(each[0])

    return jnp.sum(lax.scan(body, (jax.random.key(1), 1.0), (keys, x))[1] ** 2)


def hands_on_keys(x):
    def body(key, row):
        key, own = jax.random.split(key)
        return key, row * jax.random.normal(own)

    return jnp.sum(lax.scan(body, jax.random.key(3), x)[1] ** 2)


def without_turns(x):
    first, out = lax.scan(lambda last, row: (row, last * row), x[0], x[:0])
    return first + out.sum()


@pytest.mark.parametrize("function", [with_keys, hands_on_keys, without_turns])
def test_random_keys_and_loops_without_turns_do_no_harm(function):
    found = jax.jit(jax.value_and_grad(side_by_side(function)))(DATA)
    expected = jax.value_and_grad(function)(DATA)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_trees_go_in_and_come_out():
    def split(tree):
        out = lax.scan(lambda last, row: (row, last * 2), 0.0, tree["x"])[1]
        return {"sum": out.sum(), "rows": [out]}

    found = side_by_side(split)({"x": DATA})
    expected = np.concatenate([[0.0], 2 * DATA[:-1]])
    np.testing.assert_allclose(found["rows"][0], expected, rtol=1e-6)
    np.testing.assert_allclose(found["sum"], expected.sum(), rtol=1e-5)
