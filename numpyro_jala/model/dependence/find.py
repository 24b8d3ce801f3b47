"""Independent components of a latent vector, found in the program of its density.

Given the params, a log-density is a sum of factors. Two coordinates are linked if some
factor depends on both, and the connected components of that graph are independent of
one another. They are read off the program: each element of each array carries a label
that says which coordinates it depends on.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from numpyro_jala.backend import compilation
from numpyro_jala.model.dependence.graph import Graph, components, fill, members_of
from numpyro_jala.model.dependence.values import UNKNOWN, Value
from numpyro_jala.model.dependence.walk import walk

Array: TypeAlias = jax.Array
Tree: TypeAlias = Any

#: ``function(params, position) -> factors``, a tree of arrays of log-density terms.
Factors: TypeAlias = Callable[[Tree, Array], Tree]

#: Relative size of the changes of params at which components are confirmed.
PERTURBATION = 0.1


class Components(NamedTuple):
    """Coordinates and factors, each with the number of its component.

    coordinates
        Components are numbered by first appearance.
    factors
        A tree like the function's output; -1 where a factor depends on no coordinate.
    """

    coordinates: np.ndarray  # (dim,)
    factors: Tree


def find(function: Factors, params: Tree, position: Array) -> Components:
    """Find the coordinates that are independent of each other, whatever the params.

    The components are never finer than the truth: where the program's structure cannot
    be followed, coordinates are taken to be linked.

    Parameters
    ----------
    function
        ``function(params, position)`` returns a tree of arrays; each element is a factor.
    params, position
        Arguments with the shapes and types of interest. Their values do not matter.

    Returns
    -------
    The component of each coordinate and of each factor.
    """
    graph, labels, structure = _follow(function, params, position)
    number = components(graph, _flatten(labels))
    factors = [np.where(each < 0, -1, number[each]) for each in labels]
    return Components(number[: position.size], jax.tree.unflatten(structure, factors))


def find_members(
    function: Factors, params: Tree, position: Array, most: int
) -> np.ndarray | None:
    """Find the coordinates that each factor depends on.

    (factors, at most ``most``), filled up by -1; None where a factor depends on more.
    """
    graph, labels, _ = _follow(function, params, position)
    return members_of(graph, _flatten(labels), most)


def _follow(
    function: Factors, params: Tree, position: Array
) -> tuple[Graph, list[np.ndarray], Any]:
    """Label the factors by what they depend on; return the structure of their tree too."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(params, position)
    dim = position.shape[0]
    graph = Graph(dim)
    unknown = [UNKNOWN for _ in jax.tree.leaves(params)]
    results = walk(graph, program, [*unknown, Value(np.arange(dim))])
    leaves, structure = jax.tree.flatten(shapes)
    pairs = zip(results, leaves, strict=True)
    return graph, [fill(each.labels, leaf.shape) for each, leaf in pairs], structure


def _flatten(labels: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(each.ravel() for each in labels)])


def confirm(
    function: Factors,
    found: Components,
    params: Tree,
    positions: np.ndarray,
    seed: int,
    num_directions: int = 8,
) -> bool:
    """Confirm by derivatives that no factor depends on another component's coordinates.

    A random half of the components moves along random directions, then the other half.
    The derivative of every factor of a component at rest must be exactly zero. A
    derivative that is not a number counts against ``found`` where the factor is finite.

    Parameters
    ----------
    function, found
        The factors, and what ``find`` says of them.
    params
        Changed at random by about a tenth at each position.
    positions
        Points at which to differentiate, (num_positions, dim).
    seed
        Chooses components, directions and params.
    num_directions
        Directions at each position.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(params, positions[0])
    structure = jax.tree.structure(shapes)
    num_components = int(found.coordinates.max(initial=-1)) + 1

    # Data and labels are arguments: of long ones a compiler would make more than of this.
    @partial(jax.jit, compiler_options=compilation.options_to_compile_soon())
    def holds(data: Any, labels: Components, at: Array, number: Array) -> Array:
        def factors(*inputs: Tree) -> Any:
            function = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, data))
            return jax.tree.unflatten(structure, function(*jax.tree.leaves(inputs)))

        key = random.fold_in(random.key(seed), number // 2)
        flip = number % 2 == 1
        return _holds(factors, labels, num_components, params, key, at, flip)

    data, labels = jax.device_put((program.consts, found))  # once for all directions
    each = 2 * math.ceil(num_directions / 2)
    return all(
        bool(holds(data, labels, position, np.int32(i * each + j)))
        for i, position in enumerate(positions)
        for j in range(num_directions)
    )


def _holds(
    function: Factors,
    found: Components,
    num_components: int,
    params: Tree,
    rng_key: Array,
    position: Array,
    flip: Array,
) -> Array:
    """Test one direction at one position."""
    params_key, half_key, direction_key = random.split(rng_key, 3)
    near = _perturb(params_key, params)
    moves = random.bernoulli(half_key, shape=(num_components,)) != flip
    # The last entry is read at -1, by factors that no coordinate may move.
    moves = jnp.append(moves, False)
    direction = random.normal(direction_key, position.shape, position.dtype)
    direction = jnp.where(moves[found.coordinates], direction, 0)
    factors, tangents = jax.jvp(lambda x: function(near, x), (position,), (direction,))
    trees = map(jax.tree.leaves, (found.factors, factors, tangents))
    faults = [
        jnp.any(~moves[component] & (tangent != 0) & jnp.isfinite(factor))
        for component, factor, tangent in zip(*trees, strict=True)
        if tangent.dtype != jax.dtypes.float0
    ]
    holds: Array = ~jnp.any(jnp.array([False, *faults]))
    return holds


def _perturb(rng_key: Array, params: Tree) -> Tree:
    """Change params by about a tenth, keeping the signs of those that are not zero."""
    leaves, structure = jax.tree.flatten(params)
    keys = random.split(rng_key, max(len(leaves), 1))

    def near(key: Array, given: Any) -> Array:
        leaf: Array = jnp.asarray(given)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = PERTURBATION * random.normal(key, leaf.shape, leaf.dtype)
        return jnp.where(leaf == 0, noise, leaf * jnp.exp(noise))

    return jax.tree.unflatten(structure, list(map(near, keys, leaves)))
