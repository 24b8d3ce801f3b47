"""The graph of labels: what each element of each array depends on.

An element carries one *label*: -1 if it depends on no coordinate, the number of a
coordinate if it depends on that one alone, and otherwise the number of a *node*. A node
stands for all the labels that it is linked to. It becomes part of a component only if a
factor depends on it, so what the program computes and never uses links nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.sparse import csgraph

Labels: TypeAlias = npt.NDArray[np.int64]
Shape: TypeAlias = tuple[int, ...]


#: A factor that depends on few coordinates does so by no more steps, nor by way of more
#: nodes at a time, in units of the coordinates.
_DEEPEST, _WIDEST = 64, 4


class Graph:
    """Labels and the links between them, from each node to the labels it stands for.

    The first ``num_coordinates`` labels are the coordinates themselves.
    """

    def __init__(self, num_coordinates: int) -> None:
        self.num_coordinates = num_coordinates
        self.num_labels = num_coordinates
        self.nodes: list[Labels] = []
        self.members: list[Labels] = []

    def add(self, count: int) -> Labels:
        """Make ``count`` nodes that stand for nothing yet."""
        self.num_labels += count
        return np.arange(self.num_labels - count, self.num_labels)

    def link(self, nodes: Labels, members: Labels) -> None:
        """Let each of ``nodes`` stand for the label beside it in ``members``."""
        self.nodes.append(nodes)
        self.members.append(members)


def fill(labels: Labels | None, shape: Shape) -> Labels:
    """Write labels out in full, -1 where there are none."""
    return np.broadcast_to(np.int64(-1) if labels is None else labels, shape)


def join(graph: Graph, groups: Labels, labels: Labels, num_groups: int) -> Labels:
    """Label each group of elements by everything that its elements depend on.

    Parameters
    ----------
    graph
        Gains a node for each group with more than one label.
    groups, labels
        The group and the label of each element.
    num_groups
        The number of groups, of which some may have no elements.

    Returns
    -------
    The label of each group.
    """
    present = labels >= 0
    groups, labels = groups[present], labels[present]
    joined = np.full(num_groups, -1)
    joined[groups] = labels
    mixed = np.zeros(num_groups, bool)
    mixed[groups[labels != joined[groups]]] = True
    joined[mixed] = graph.add(int(mixed.sum()))
    linked = mixed[groups]
    graph.link(joined[groups[linked]], labels[linked])
    return joined


def combine(graph: Graph, parts: Sequence[Labels | None]) -> Labels | None:
    """Label each element by what the elements of ``parts`` at its place depend on."""
    # The same array often arrives twice, as in x * sigmoid(x), and then costs nothing.
    present = list({id(part): part for part in parts if part is not None}.values())
    if not present:
        return None
    total = present[0]
    for part in present[1:]:
        total = _pair(graph, total, part)
    return total


def _pair(graph: Graph, first: Labels, second: Labels) -> Labels:
    first, second = np.broadcast_arrays(first, second)
    result = np.asarray(np.maximum(first, second))
    mixed = (first != second) & (np.minimum(first, second) >= 0)
    if mixed.any():
        nodes = graph.add(int(mixed.sum()))
        graph.link(nodes, first[mixed])
        graph.link(nodes, second[mixed])
        result[mixed] = nodes
    return result


def merge(graph: Graph, labels: Labels | None, axes: Sequence[int]) -> Labels | None:
    """Join the labels along ``axes``, which stay with length one."""
    if labels is None:
        return None
    axes = [axis % labels.ndim for axis in axes]
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(labels.shape))
    num_groups = int(np.prod(shape))
    groups = np.broadcast_to(np.arange(num_groups).reshape(shape), labels.shape)
    return join(graph, groups.ravel(), labels.ravel(), num_groups).reshape(shape)


def accumulate(graph: Graph, labels: Labels, axis: int, reverse: bool) -> Labels:
    """Label each element by those up to it along ``axis``.

    Each element gets a node that stands for the element and for the node before it, so
    the links are as many as the elements.
    """
    ordered = np.moveaxis(np.flip(labels, axis) if reverse else labels, axis, -1)
    started = np.maximum.accumulate(ordered >= 0, axis=-1)
    nodes = np.full(ordered.shape, -1)
    nodes[started] = graph.add(int(started.sum()))
    present = ordered >= 0
    graph.link(nodes[present], ordered[present])
    follows = started[..., :-1]
    graph.link(nodes[..., 1:][follows], nodes[..., :-1][follows])
    nodes = np.moveaxis(nodes, -1, axis)
    return np.flip(nodes, axis) if reverse else nodes


def components(graph: Graph, factors: Labels) -> Labels:
    """Count off the component of each label, by first appearance among the coordinates.

    Parameters
    ----------
    graph
        The links of the whole program.
    factors
        The labels of all factors. Nodes that no factor depends on link nothing.
    """
    nodes = np.concatenate([*graph.nodes, np.zeros(0, np.int64)])
    members = np.concatenate([*graph.members, np.zeros(0, np.int64)])
    coordinates = np.arange(graph.num_coordinates)
    present = np.zeros(graph.num_labels + 1, bool)
    present[factors] = True  # that of no label in the last place
    used = _reachable(nodes, members, graph.num_labels, np.flatnonzero(present[:-1]))
    # The nodes of a loop's carry may stand for no coordinate; they link nothing either.
    real = _reachable(members, nodes, graph.num_labels, coordinates)
    kept = used[nodes] & real[members]
    links = _matrix(nodes[kept], members[kept], graph.num_labels)
    raw = csgraph.connected_components(links, directed=False)[1]
    # Nodes that are used belong to some coordinate; numbers of the others mean nothing.
    _, first = np.unique(raw[: graph.num_coordinates], return_index=True)
    rank = np.full(graph.num_labels, -1)
    rank[raw[np.sort(first)]] = np.arange(first.size)
    numbers: Labels = rank[raw]
    return numbers


def members_of(graph: Graph, factors: Labels, most: int) -> Labels | None:
    """Return the coordinates that each factor depends on, filled up by -1.

    (factors, at most ``most``); None where a factor depends on more.
    """
    nodes = np.concatenate([*graph.nodes, np.zeros(0, np.int64)])
    members = np.concatenate([*graph.members, np.zeros(0, np.int64)])
    dim = graph.num_coordinates
    stay = np.arange(dim)
    links = _matrix(
        np.concatenate([stay, nodes]), np.concatenate([stay, members]), graph.num_labels
    )
    has_label = np.flatnonzero(factors >= 0)
    found = sparse.csr_matrix(
        (np.ones(has_label.size, np.float32), (has_label, factors[has_label])),
        shape=(factors.size, graph.num_labels),
    )
    for _ in range(_DEEPEST):
        if not (found.indices >= dim).any():
            return _rows(found, most)
        found = found @ links
        found.data[:] = 1.0
        if np.diff(found.indptr).max() > _WIDEST * most:
            return None
    return None


def _rows(found: sparse.csr_matrix, most: int) -> Labels | None:
    """Return the columns of the entries in each row of a matrix, filled up by -1."""
    counts = np.diff(found.indptr)
    if counts.max(initial=0) > most:
        return None
    rows = np.full((counts.size, most), -1)
    rows[np.arange(most) < counts[:, None]] = found.indices
    return rows


def _reachable(
    nodes: Labels, members: Labels, num_labels: int, starts: Labels
) -> npt.NDArray[np.bool_]:
    """Mark the labels that can be reached from ``starts`` along links."""
    root = np.full(starts.size, num_labels)
    links = _matrix(
        np.concatenate([nodes, root]), np.concatenate([members, starts]), num_labels + 1
    )
    found = csgraph.breadth_first_order(links, num_labels, return_predecessors=False)
    reached = np.zeros(num_labels + 1, bool)
    reached[found] = True
    return reached[:-1]


def _matrix(rows: Labels, columns: Labels, size: int) -> sparse.csr_matrix:
    ones = np.ones(rows.size, np.float32)
    return sparse.csr_matrix((ones, (rows, columns)), shape=(size, size))
