import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import partition as parts

#: Components of sizes 3, 1, 7, 2, 1, 4, whose coordinates are mixed up.
SIZES = [3, 1, 7, 2, 1, 4]
LABELS = np.random.default_rng(0).permutation(np.repeat([10, 3, 7, 0, 25, 4], SIZES))


@pytest.fixture(params=["joint", "several", "in order", "one each"])
def partition(request):
    if request.param == "joint":
        return parts.joint(18)
    labels = {
        "several": LABELS,
        "in order": np.arange(18) // 3,
        "one each": np.random.default_rng(1).permutation(18),
    }
    return parts.partition(labels[request.param])


def rows_of(partition, *leading):
    return random.normal(random.key(0), (*leading, partition.dim))


def test_components_are_the_labels():
    partition = parts.partition(LABELS)
    assert partition.num_components == 6 and partition.dim == LABELS.size
    for owner in range(6):
        assert len(set(LABELS[partition.owner == owner])) == 1
    assert sorted(partition.sizes) == sorted(SIZES)
    np.testing.assert_array_equal(partition.sizes, np.bincount(partition.owner))
    # Sizes 1 by themselves, 2 to 4 in one block, and 5 to 16 in one.
    assert [block.shape for block in partition.blocks] == [(2, 1), (3, 4), (1, 7)]
    slots = [sorted(partition.slot[partition.owner == owner]) for owner in range(6)]
    assert slots == [list(range(size)) for size in partition.sizes]


def test_a_component_keeps_the_order_of_its_coordinates():
    partition = parts.partition(LABELS)
    for owner in range(6):
        assert (np.diff(partition.slot[partition.owner == owner]) == 1).all()


def test_blocks_hold_the_coordinates_and_zero_where_they_are_padded(partition):
    rows = 1.0 + rows_of(partition, 2, 5) ** 2
    owner = 0
    for block in partition.split(rows):
        for component in range(block.shape[1]):
            mine = partition.owner == owner
            found, size = block[:, component], mine.sum()
            np.testing.assert_array_equal(found[..., :size], rows[..., mine])
            assert (found[..., size:] == 0).all()
            owner += 1
    assert owner == partition.num_components


@pytest.mark.parametrize("leading", [(5,), (2, 5), (3, 2, 5)])
def test_what_is_split_is_joined_again(partition, leading):
    rows = rows_of(partition, *leading)
    blocks = partition.split(rows)
    for block, index in zip(blocks, partition.blocks, strict=True):
        assert block.shape == (*leading[:-1], len(index), leading[-1], index.shape[1])
    np.testing.assert_array_equal(partition.join(blocks), rows)


def test_what_stands_in_the_padding_is_left_out():
    partition = parts.partition(LABELS)
    rows = rows_of(partition, 2, 5)
    blocks = [
        jnp.where(jnp.asarray(index < partition.dim)[:, None], block, jnp.nan)
        for block, index in zip(partition.split(rows), partition.blocks, strict=True)
    ]
    assert any(np.isnan(block).any() for block in blocks)
    np.testing.assert_array_equal(partition.join(blocks), rows)


def test_a_total_is_that_of_a_component(partition):
    rows = rows_of(partition, 2, 5)
    found = partition.total(rows)
    assert found.shape == (2, partition.num_components, 5)
    for owner in range(partition.num_components):
        expected = np.asarray(rows)[..., partition.owner == owner].sum(-1)
        np.testing.assert_allclose(found[:, owner], expected, rtol=1e-5, atol=1e-5)


def test_a_coordinate_has_the_value_of_its_component(partition):
    values = random.normal(random.key(1), (2, partition.num_components))
    spread = jnp.broadcast_to(partition.spread(values), (2, partition.dim))
    np.testing.assert_array_equal(spread, values[:, partition.owner])
    # Spreading is the transpose of a total.
    rows = rows_of(partition, 2, 1)
    np.testing.assert_allclose(
        jnp.sum(spread[:, None] * rows),
        jnp.sum(values[..., None] * partition.total(rows)),
        rtol=1e-4,
    )


def test_blocks_have_the_values_of_their_components(partition):
    values = random.normal(random.key(1), (2, partition.num_components, 3))
    found = partition.of_block(values)
    assert [len(index) for index in partition.blocks] == [v.shape[1] for v in found]
    np.testing.assert_array_equal(jnp.concatenate(found, 1), values)


def test_entries_past_the_end_are_zero():
    values = jnp.arange(1.0, 7.0).reshape(2, 3)
    index = np.array([[2, 0], [3, 1]])
    expected = [[[3, 1], [0, 2]], [[6, 4], [0, 5]]]
    np.testing.assert_array_equal(parts.take(values, index), expected)
    in_order = parts.take(values, np.arange(3)[:, None])
    np.testing.assert_array_equal(in_order, values[..., None])
    inside = parts.take(values, np.array([1, 1, 0]))
    np.testing.assert_array_equal(inside, values[:, jnp.array([1, 1, 0])])
