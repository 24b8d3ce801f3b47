import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import factor as factors
from numpyro_jala.engine.factor import IDENTITY, Factor
from numpyro_jala.engine.partition import joint, partition

NUM_ISLANDS = 3
LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), [2, 4, 1, 7, 3]))


def make(kind):
    """Return a partition, a factor, and its dense matrix for each island."""
    parts = joint(6) if kind.startswith("joint") else partition(LABELS)
    rng = np.random.default_rng(1)
    dense = np.zeros((NUM_ISLANDS, parts.dim, parts.dim))
    blocks = []
    for index in parts.blocks:
        num_components, size = index.shape
        # The last block of several is diagonal.
        is_diagonal = kind == "joint diagonal" or (size == 7 and kind == "mixed")
        shape = (NUM_ISLANDS, num_components, size)
        diagonal = 0.5 + rng.random(shape)
        matrix = diagonal[..., None] * np.eye(size)
        if not is_diagonal:
            matrix = matrix + np.tril(rng.normal(size=(*shape, size)), -1) / 2
        real = index < parts.dim
        # As a factor of a covariance is, of coordinates that are constant.
        pair = real[:, :, None] & real[:, None]
        matrix = np.where(pair, matrix, 1e-10 * np.eye(size))
        for component, own in enumerate(index):
            mine = own[own < parts.dim]
            place = np.ix_(range(NUM_ISLANDS), mine, mine)
            dense[place] = matrix[:, component, : mine.size, : mine.size]
        diagonal = np.where(real, diagonal, 1e-10)
        blocks.append(jnp.asarray(diagonal if is_diagonal else matrix))
    return parts, Factor(tuple(blocks)), dense


KINDS = ["joint", "joint diagonal", "several", "mixed"]


@pytest.fixture(params=KINDS)
def made(request):
    return make(request.param)


def rows_for(parts):
    return np.asarray(random.normal(random.key(0), (NUM_ISLANDS, 4, parts.dim)))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_blocks_are_padded_and_one_is_diagonal():
    parts, factor, _ = make("mixed")
    assert [block.ndim for block in factor.blocks] == [4, 4, 3]
    assert any((index == parts.dim).any() for index in parts.blocks)


def test_a_factor_multiplies_as_a_matrix_of_blocks(made):
    parts, factor, dense = made
    rows = rows_for(parts)
    found = factors.apply(factor, parts, jnp.asarray(rows))
    close(found, np.einsum("jde,jne->jnd", dense, rows))
    turned = factors.apply_transposed(factor, parts, jnp.asarray(rows))
    close(turned, np.einsum("jed,jne->jnd", dense, rows))


def test_one_island_at_a_time_is_the_same(made):
    parts, factor, dense = made
    rows = rows_for(parts)
    for apply in (factors.apply, factors.apply_transposed):
        together = apply(factor, parts, jnp.asarray(rows))
        mapped = jax.vmap(lambda f, r, apply=apply: apply(f, parts, r))
        close(mapped(factor, jnp.asarray(rows)), together)


def test_solving_undoes_multiplying(made):
    parts, factor, dense = made
    rows = rows_for(parts)
    found = factors.solve(factor, parts, jnp.asarray(rows))
    expected = np.linalg.solve(dense, np.swapaxes(rows, 1, 2))
    close(found, np.swapaxes(expected, 1, 2))


def test_the_determinant_of_a_component_is_that_of_its_matrix(made):
    parts, factor, dense = made
    found = factors.log_determinant(factor, parts)
    assert found.shape == (NUM_ISLANDS, parts.num_components)
    for owner in range(parts.num_components):
        mine = np.flatnonzero(parts.owner == owner)
        close(found[:, owner], np.linalg.slogdet(dense[:, mine[:, None], mine])[1])


@pytest.mark.parametrize("apply", [factors.apply, factors.apply_transposed])
def test_without_blocks_the_factor_is_the_identity(apply):
    parts = partition(LABELS)
    rows = jnp.asarray(rows_for(parts))
    np.testing.assert_array_equal(apply(IDENTITY, parts, rows), rows)
