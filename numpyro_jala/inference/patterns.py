"""Find where the second derivative of a model's potential has entries.

A layout and data come in; the layout with a pattern goes out. A band hangs on the order of
the latents, and is found by probing. An arrow hangs on which latents each term of the density
depends on, and so on values such as the groups of rows: it is found anew for other data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.engine import banded, sparsity
from numpyro_jala.engine.arrow import Arrow, Parts
from numpyro_jala.engine.sparsity import Pattern
from numpyro_jala.model.components import find_members
from numpyro_jala.model.density import Layout


def lay_out(
    layout: Layout,
    params: Array,
    arrays: list[Array],
    most_dense: int,
    before: Sequence[Layout],
) -> Layout:
    """Return the layout with a pattern, one of those ``before`` for other data if it holds.

    Parameters
    ----------
    most_dense
        Most latents of which all may be tied to all; of more there is no pattern.
    """
    arrows = [each for each in before if isinstance(each.pattern, Arrow)]
    if len(arrows) < len(before):
        return before[0]
    if not before:
        return replace(layout, pattern=_find(layout, params, arrays, most_dense))
    arrow = _find_arrow(layout, params, arrays)
    same = [each for each in arrows if arrow is not None and arrow.equals(each.pattern)]
    return same[0] if same else replace(layout, pattern=arrow)


def _find(
    layout: Layout, params: Array, arrays: list[Array], most_dense: int
) -> Pattern | None:
    order = layout.natural_order()
    probes, keys = sparsity.band_probes(order), random.split(random.key(0))
    found = np.asarray(_probe(layout, keys, params, arrays, probes))
    band = sparsity.find_band(order, found)
    if band.num_blocks > 1:
        return band
    arrow = _find_arrow(layout, params, arrays)
    if arrow is not None:
        parts = _parts(replace(layout, pattern=arrow), keys, params, arrays)
        if sparsity.makes_up(arrow, jax.device_get(parts), found[:, 0]):
            return arrow
    return band if band.dim <= most_dense else None


def _find_arrow(layout: Layout, params: Array, arrays: list[Array]) -> Arrow | None:
    """Find an arrow by the terms of the density, sites with many latents first."""
    somewhere = jnp.zeros(layout.dim, layout.anchor.dtype)
    members = find_members(layout.terms(arrays), params, somewhere)
    if members is None:
        return None
    sites = sorted(layout.columns().values(), key=len, reverse=True)
    return sparsity.find_arrow(members, np.concatenate(sites))


@compilation.program(static_argnums=0)
def _probe(
    layout: Layout, keys: PRNGKey, params: Array, arrays: list[Array], probes: Array
) -> Array:
    """Return products of the second derivative with some vectors, at draws of the prior."""
    energy = layout.energy(arrays)

    def one(key: PRNGKey) -> Array:
        point = layout.draw_prior(key, params, arrays)
        return banded.products(partial(energy, params), point, probes)

    return jax.vmap(one)(keys)


@compilation.program(static_argnums=0)
def _parts(layout: Layout, keys: PRNGKey, params: Array, arrays: list[Array]) -> Parts:
    """Return second derivatives at draws of the prior."""
    assert isinstance(layout.pattern, Arrow)
    find, energy = layout.pattern.hessian, partial(layout.energy(arrays), params)
    return lax.map(lambda key: find(energy, layout.draw_prior(key, params, arrays)), keys)
