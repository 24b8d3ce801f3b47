"""A sum is taken apart to what was marked, whatever adds it up, and no further."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp

from numpyro_jala.model.summands import mark, take_apart

A = jnp.array([0.3, -1.2, 2.0])
B = jnp.array([[1.5, -0.4, 0.7], [0.2, 3.0, -2.2]])
ONE = jnp.array(0.6)


def terms_of(function):
    """Take apart what a function makes of marked arrays."""
    return take_apart(jax.make_jaxpr(lambda: function(mark(A, "a"), mark(B, "b")))())


@jax.jit
def called(a, b):
    return jax.jit(lambda x: -x.sum())(b) - a.sum()


#: Functions of marked arrays a (3,) and b (2, 3), and their terms in the order of marks.
SUMS = {
    "a sum": (lambda a, b: a.sum() + b.sum(), [A, B]),
    "in the other order": (lambda a, b: b.sum() + a.sum(), [A, B]),
    "a difference": (lambda a, b: a.sum() - b.sum(), [A, -B]),
    "a difference of differences": (
        lambda a, b: 0.0 - (b.sum() - a.sum()),
        [A, -B],
    ),
    "the negative of a difference": (lambda a, b: -(a.sum() - b.sum()), [-A, B]),
    "a sum entry by entry": (lambda a, b: (b.sum(0) - a).sum(), [-A, B]),
    "rows that one array is added to": (lambda a, b: (a + b).sum(), [2 * A, B]),
    "a number that is added to entries": (
        lambda a, b: (a.sum() - b).sum(),
        [6 * A, -B],
    ),
    "entries that are moved about": (
        lambda a, b: (b.T[::-1].reshape(2, 3) + a[::-1][None]).sum(),
        [2 * A, B],
    ),
    "several arrays in one": (
        lambda a, b: jnp.concatenate([a, -b.ravel()]).sum(),
        [A, -B],
    ),
    "a known multiple": (lambda a, b: 3.0 * a.sum() + b.sum() * -0.5, [3 * A, -0.5 * B]),
    "one that counts nothing": (lambda a, b: 0.0 * a.sum() + b.sum(), [B]),
    "functions of an array by themselves": (
        lambda a, b: jnp.exp(a).sum() + jnp.square(b).sum(1).prod(),
        [jnp.exp(A), jnp.square(B).sum(1).prod()],
    ),
    "a logarithm of sums": (lambda a, b: logsumexp(b, 0).sum() - a.sum(), [-A, None]),
    "a product": (lambda a, b: (a * b).sum(), [A * B]),
    "what is marked in two places": (
        lambda a, b: a.sum() + (a + b.sum(0)).sum(),
        [A.sum() + (A + B.sum(0)).sum()],
    ),
    "a constant": (lambda a, b: ONE + a.sum(), [ONE + A.sum()]),
    "a rounded number": (lambda a, b: jnp.floor(a).astype(int).sum(), [jnp.floor(A)]),
    "whole numbers cast to real ones": (
        lambda a, b: (a.astype(int) + jnp.round(a).astype(int)).astype(float).sum(),
        [A.astype(int) + jnp.round(A).astype(int)],
    ),
    "entries cast to whole numbers": (
        lambda a, b: (a + b[0]).astype(int).astype(float).sum(),
        [(A + B[0]).astype(int)],
    ),
    "calls within calls": (lambda a, b: 2.0 * called(a, b), [-2 * A, -2 * B]),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_taken_apart(name):
    function, expected = SUMS[name]
    found = terms_of(function)
    np.testing.assert_allclose(sum(map(jnp.sum, found)), function(A, B), rtol=1e-6)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            np.testing.assert_allclose(one, other, rtol=1e-6)
