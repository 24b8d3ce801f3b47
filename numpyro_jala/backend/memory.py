"""What is written to memory, and what stays where it is.

A compiler looks through a branch and through a barrier, but not through a loop.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from numpyro_jala._typing import Array, Tree


def change_if(needed: Array, change_fn: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """Change arrays if that is needed, else leave them where they are in memory.

    A loop of one turn at most: a branch would copy the arrays in either case.
    """

    def once(carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
        return jnp.asarray(False), change_fn(carry[1])

    return lax.while_loop(lambda carry: carry[0], once, (needed, tree))[1]


def written_out(array: Array) -> Array:
    """Have an array computed once, whatever reads it.

    A compiler for CPUs would compute a latent anew for each row of data that reads it, and
    does not respect an optimisation barrier. The loop never turns, unless the array begins
    with NaN, which stays.
    """
    first = array.reshape(-1)[:1]
    return change_if((first != first).any(), lambda values: values + 0 * values, array)
