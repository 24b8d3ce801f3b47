"""Random programs over a position, and their components by brute force.

Each operation takes the generator, the arrays made so far and the params, and returns a
new array of one axis. Weights are random so that nothing cancels by accident.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.sparse.csgraph import connected_components

NUM_PARAMS = 3


def pick(rng, pool):
    return pool[rng.integers(len(pool))]


def pair(rng, pool):
    first, second = pick(rng, pool), pick(rng, pool)
    length = min(first.size, second.size)
    return first[:length], second[:length]


def weights(rng, shape):
    return rng.uniform(0.5, 1.5, shape).astype(np.float32)


def sparse(rng, shape):
    return weights(rng, shape) * (rng.uniform(size=shape) < 0.4)


def unary(rng, pool, params):
    fn = pick(rng, [jnp.sin, jnp.tanh, jnp.abs, jax.nn.softplus, jnp.square, jax.nn.relu])
    return fn(pick(rng, pool))


def scaled(rng, pool, params):
    return jnp.exp(0.1 * params[rng.integers(NUM_PARAMS)]) * pick(rng, pool)


def binary(rng, pool, params):
    a, b = pair(rng, pool)
    fn = pick(rng, [jnp.add, jnp.multiply, jnp.maximum, jnp.minimum])
    return fn(weights(rng, a.shape) * a, b + 0.3)


def gathered(rng, pool, params):
    a = pick(rng, pool)
    return a[rng.integers(-a.size, a.size, rng.integers(1, 7))]


def gathered_with_fill(rng, pool, params):
    a = pick(rng, pool)
    indices = rng.integers(0, a.size + 3, 4)
    return a.at[indices].get(mode="fill", fill_value=0.7)


def gathered_rows(rng, pool, params):
    a = pick(rng, pool)
    table = jnp.outer(a, weights(rng, 2)) + jnp.roll(a, 1)[:, None]
    return table[rng.integers(0, a.size, 2), rng.integers(0, 2, 2)]


def chosen_by_data(rng, pool, params):
    a, b = pair(rng, pool)
    return jnp.where(rng.uniform(size=a.size) < 0.5, a, jnp.sin(a * b))


def chosen_by_param(rng, pool, params):
    a, b = pair(rng, pool)
    return jnp.where(params[rng.integers(NUM_PARAMS)] > 0, a, b)


def masked(rng, pool, params):
    a = pick(rng, pool)
    return a * (rng.uniform(size=a.size) < 0.6) + 0.1


def reduced(rng, pool, params):
    fn = pick(rng, [jnp.sum, jnp.max, jax.nn.logsumexp, jnp.prod])
    return fn(pick(rng, pool)).reshape(1)


def reduced_rows(rng, pool, params):
    a = pick(rng, pool)
    even = a[: 2 * (a.size // 2)] if a.size > 1 else jnp.tile(a, 2)
    return even.reshape(2, -1).T.sum(int(rng.integers(2)))


def segments(rng, pool, params):
    a = pick(rng, pool)
    return jax.ops.segment_sum(a, rng.integers(0, 3, a.size), num_segments=3)


def product(rng, pool, params):
    a = pick(rng, pool)
    return sparse(rng, (int(rng.integers(1, 6)), a.size)) @ a


def scaled_product(rng, pool, params):
    a = pick(rng, pool)
    return a @ (jnp.exp(0.1 * params[0]) * sparse(rng, (a.size, 4)))


def matrix_of_latents(rng, pool, params):
    a, b = pair(rng, pool)
    return (jnp.diag(a) + sparse(rng, (a.size, a.size))) @ b


def both_latent(rng, pool, params):
    a, b = pair(rng, pool)
    return jnp.einsum("i,j,jk->ik", a, b, sparse(rng, (b.size, 2))).sum(0)


def cumulated(rng, pool, params):
    fn = pick(rng, [lax.cumsum, lax.cumlogsumexp, lax.cummax])
    return fn(pick(rng, pool), reverse=bool(rng.integers(2)))


def concatenated(rng, pool, params):
    return jnp.concatenate([pick(rng, pool), pick(rng, pool)])[-8:]


def reordered(rng, pool, params):
    a = pick(rng, pool)
    return pick(
        rng, [a[::-1], jnp.roll(a, 1), a[::2], jnp.repeat(a[:3], 2), jnp.tile(a[:2], 2)]
    )


def padded(rng, pool, params):
    return lax.pad(pick(rng, pool), jnp.float32(0.5), [(1, -1, int(rng.integers(2)))])[:8]


def written(rng, pool, params):
    a, b = pair(rng, pool)
    indices = rng.integers(0, a.size, b.size)
    return pick(
        rng, [a.at[indices].add(b), a.at[indices[:1]].set(b[:1]), a.at[0].set(b[-1])]
    )


def sliced(rng, pool, params):
    a = pick(rng, pool)
    length = int(rng.integers(1, a.size + 1))
    return lax.dynamic_slice(a, (int(rng.integers(a.size)),), (length,))


def updated(rng, pool, params):
    a, b = pair(rng, pool)
    return lax.dynamic_update_slice(a, b[:1], (int(rng.integers(a.size)),))


def stacked(rng, pool, params):
    a, b = pair(rng, pool)
    rows = jnp.stack([a, b], axis=int(rng.integers(2)))
    return jnp.sort(rows, axis=-1)[0]


def scanned_apart(rng, pool, params):
    a, shared = pick(rng, pool), weights(rng, ())
    carry, out = lax.scan(lambda c, x: (c + 1, jnp.sin(x * shared + c)), 0.0, a)
    return out


def scanned_walk(rng, pool, params):
    a = pick(rng, pool)
    reverse = bool(rng.integers(2))
    return lax.scan(lambda c, x: (0.5 * c + x, jnp.tanh(c + x)), 0.1, a, reverse=reverse)[1]


def scanned_counter(rng, pool, params):
    a = pick(rng, pool)
    return lax.fori_loop(0, a.size - 1, lambda i, s: s.at[i].set(s[i] * 1.3), a)


def branched(rng, pool, params):
    a = pick(rng, pool)
    return lax.cond(params[0] > 0, lambda x: x * 1.1, lambda x: jnp.roll(x, 1), a)


def solved(rng, pool, params):
    a = pick(rng, pool)
    even = a[: 2 * (a.size // 2)] if a.size > 1 else jnp.tile(a, 2)
    lower = jnp.array([[1.0, 0.0], [0.4, 1.2]]) * jnp.exp(0.1 * params[1])
    full = lax.linalg.triangular_solve(
        lower, even.reshape(2, -1), left_side=True, lower=True
    )
    return full.sum(0)


def vmapped(rng, pool, params):
    a, b = pair(rng, pool)
    return jax.vmap(lambda x, y: jnp.where(x > 0, x * y, jnp.sin(x + y)))(a, b)


def checkpointed(rng, pool, params):
    a = pick(rng, pool)
    return jax.checkpoint(jax.jit(lambda x: jnp.sin(x) + jax.nn.silu(x)))(a)


OPERATIONS = [
    binary,
    both_latent,
    branched,
    checkpointed,
    chosen_by_data,
    chosen_by_param,
    concatenated,
    cumulated,
    gathered,
    gathered_rows,
    gathered_with_fill,
    masked,
    matrix_of_latents,
    padded,
    product,
    reduced,
    reduced_rows,
    reordered,
    scaled,
    scaled_product,
    scanned_apart,
    scanned_counter,
    scanned_walk,
    segments,
    sliced,
    solved,
    stacked,
    unary,
    updated,
    vmapped,
    written,
]


def program(seed):
    """Return the factors of a random program and the number of its coordinates."""

    def factors(params, position):
        rng = np.random.default_rng(seed)
        dim, num_steps = int(rng.integers(3, 9)), int(rng.integers(1, 7))
        pool = [position, position[: dim // 2], position[dim // 2 :]]
        for _ in range(num_steps):
            operation = OPERATIONS[rng.integers(len(OPERATIONS))]
            pool.append(operation(rng, pool, params))
        return {"last": pool[-1], "some": pool[int(rng.integers(1, len(pool)))]}

    return factors, int(np.random.default_rng(seed).integers(3, 9))


def derivatives(factors, dim, num_points=40):
    """Return which factor depends on which coordinate, by derivatives at some points."""

    def flat(params, position):
        return jnp.concatenate(
            [leaf.ravel() for leaf in jax.tree.leaves(factors(params, position))]
        )

    rng = np.random.default_rng(0)
    params = rng.normal(size=(num_points, NUM_PARAMS)).astype(np.float32)
    points = rng.normal(size=(num_points, dim)).astype(np.float32)
    jacobian = jax.vmap(jax.jacfwd(flat, argnums=1))
    lowered = jax.jit(jacobian).lower(params, points)
    run = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    return np.any(np.asarray(run(params, points)) != 0, axis=0)


def components_of(depends):
    """Number the components of coordinates that share a factor, by first appearance."""
    raw = connected_components(depends.T.astype(int) @ depends.astype(int), directed=False)[
        1
    ]
    _, first = np.unique(raw, return_index=True)
    return np.argsort(np.argsort(first))[raw]
