"""Particles innermost: the same numbers as a plain map over them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, random
from jax.scipy.special import betainc, logsumexp

from numpyro_jala.backend import innermost
from numpyro_jala.engine.segments import Segments

SIZE, DIM = 5, 6
ROWS = np.array([3, 0, 0, 5, 2, 1, 4])
DATA = np.linspace(-1.0, 2.0, 7).astype(np.float32)
SEGMENTS = Segments(4, np.array([2, 0, 0, 3, 2, 2]))


def grouped(x):
    """Latents read by rows, data that do not vary, and a sum."""
    return jnp.sum(jax.nn.softplus(DATA + x[ROWS]) - DATA * x[ROWS])


def looped(x):
    def step(carry, value):
        return 0.5 * carry + value, jnp.tanh(carry) * value

    return lax.scan(step, x[0], x)


def indexed(x):
    def step(carry, index):
        return 0.5 * carry + x[index], jnp.tanh(carry) * x[index]

    return lax.scan(step, 0.3, np.arange(DIM))


def turned(x):
    return lax.while_loop(lambda v: v[0] < 3.0, lambda v: v + jnp.abs(v[1]) + 0.5, x)


def with_constants():
    """A function with derivatives of its own, and an array that only it knows."""
    scale = jnp.asarray(DATA[:6])

    @jax.custom_jvp
    def scaled(x):
        return jnp.sum(jnp.sin(x) * scale)

    scaled.defjvp(lambda x, dx: (scaled(*x), jnp.sum(jnp.cos(x[0]) * scale * dx[0])))
    return jax.value_and_grad(jax.jit(lambda x: scaled(x) ** 2))


FUNCTIONS = {
    "grouped": grouped,
    "its derivative": jax.grad(grouped),
    "its second derivative": jax.hessian(grouped),
    "a loop": looped,
    "a loop over entries": indexed,
    "a loop as long as it takes": turned,
    "a branch": lambda x: lax.cond(x[0] > 0, jnp.sin, lambda v: v**3, x),
    "a choice by one number": lambda x: jnp.where(x[0] > 0, x, -DATA[:6]),
    "a product from the left": lambda x: np.outer(DATA, DATA[:6]) @ x,
    "a product from the right": lambda x: x @ np.outer(DATA[:6], DATA),
    "a product of two": lambda x: x.reshape(2, 3) @ jnp.sin(x).reshape(3, 2),
    "entries at places that vary": lambda x: x[jnp.argsort(x)[:2]],
    "one entry": lambda x: x[jnp.argmax(x)],
    "written at places": lambda x: jnp.zeros(9).at[ROWS].add(DATA * x[0]),
    "written at places that vary": lambda x: jnp.zeros(6).at[jnp.argsort(x)].set(x),
    "joined with data": lambda x: jnp.concatenate([DATA, x, x[:2]]),
    "padded": lambda x: jnp.pad(x.reshape(3, 2), ((1, 0), (0, 2)), constant_values=0.3),
    "turned round": lambda x: x.reshape(2, 3).T[::-1, ::2],
    "cumulative": lambda x: (jnp.cumsum(x), lax.cumlogsumexp(x, reverse=True)),
    "extremes": lambda x: (x.reshape(2, 3).max(1), x.min(), jnp.prod(x), (x > 0).any()),
    "derivatives that are given": lambda x: jax.grad(lambda v: logsumexp(v[ROWS]))(x),
    "special functions": lambda x: betainc(jnp.exp(x[0]), 1.5, jax.nn.sigmoid(x)),
    "linear algebra": lambda x: jnp.linalg.cholesky(jnp.outer(x, x) + 3 * jnp.eye(6)),
    "sums over segments": lambda x: SEGMENTS.total(jnp.sin(x)) * DATA[:4],
    "spread over segments": lambda x: SEGMENTS.spread(jnp.cos(x[:4])),
    "nothing that varies": lambda x: (DATA, x[0]),
    "random numbers": lambda x: x + random.normal(random.key(3), (DIM,)),
    "of varying seeds": lambda x: random.uniform(random.key(jnp.argmax(x))),
    "a call with constants": with_constants(),
    "checkpointed": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "in several dimensions": lambda x: jnp.einsum("ij,kj->ik", *[x.reshape(3, 2)] * 2)[
        None
    ],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_the_plain_map(monkeypatch, name):
    monkeypatch.setattr(innermost, "_BY_INDEX", ())
    x = random.normal(random.key(1), (3, SIZE, DIM))
    plain = jax.vmap(jax.vmap(FUNCTIONS[name]))(x)
    found = jax.jit(innermost.over_particles(FUNCTIONS[name]))(x)
    assert jax.tree.structure(plain) == jax.tree.structure(found)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_what_is_closed_over_may_be_traced():
    x, scale = random.normal(random.key(1), (2, SIZE, DIM)), jnp.arange(1.0, 7.0)

    @jax.jit
    def of(scale):
        return innermost.over_particles(lambda v: jnp.sum(v * scale))(x)

    np.testing.assert_allclose(of(scale), x @ scale, rtol=1e-5)


def test_what_is_read_many_times_is_computed_once(monkeypatch):
    """What is computed of a latent is not computed again by the loop that reads it."""
    rows = np.repeat(np.arange(DIM), 50)

    def loops_that_read():
        def of(x):
            return innermost.over_particles(lambda v: jnp.sin(v[rows]))((x * x + 1.7) * x)

        program = jax.jit(of).lower(jnp.ones((2, SIZE, DIM))).compile().as_text()
        return [loop for loop in program.split("\n}") if " gather(" in loop]

    assert not any(" multiply(" in loop for loop in loops_that_read())
    monkeypatch.setattr(innermost, "written_out", lambda x: x)
    assert any(" multiply(" in loop for loop in loops_that_read())


@pytest.mark.parametrize("name", ["a loop", "a loop over entries", "grouped"])
def test_programs_with_loops_over_entries_are_mapped_plainly(monkeypatch, name):
    seen = []
    run = innermost._run
    monkeypatch.setattr(innermost, "_run", lambda *args: seen.append(args) or run(*args))
    innermost.over_particles(FUNCTIONS[name])(jnp.ones((2, SIZE, DIM)))
    assert bool(seen) == (name != "a loop over entries")


def test_nan_stays_where_it_was():
    x = jnp.array([[jnp.nan, 1.0], [2.0, jnp.nan]])
    np.testing.assert_array_equal(jax.jit(innermost.written_out)(x), x)
    np.testing.assert_array_equal(jax.jit(innermost.written_out)(-x[::-1]), -x[::-1])


@pytest.mark.parametrize("name", ["sums over segments", "grouped"])
def test_an_accelerator_puts_particles_last_where_groups_are_summed(monkeypatch, name):
    seen = []
    run = innermost._run
    monkeypatch.setattr(innermost.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(innermost, "_run", lambda *args: seen.append(args) or run(*args))
    nested = jax.jit(FUNCTIONS[name])
    innermost.over_particles(nested)(jnp.ones((2, SIZE, DIM)))
    assert bool(seen) == (name == "sums over segments")
