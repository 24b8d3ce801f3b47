"""Find where the second derivative of a model's potential has entries.

A layout and data come in; the layout with a pattern goes out. A band, of the latents or of
their cumulative sums, hangs on their order, and is found by probing. An arrow hangs on which
latents each term of the density depends on, and so on values such as the groups of rows: it
is found anew for other data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.backend.blocks import inner_programs
from numpyro_jala.engine import banded, sparsity
from numpyro_jala.engine.arrow import Arrow, Parts
from numpyro_jala.engine.sparsity import Pattern
from numpyro_jala.engine.summed import Summed
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
    if before and not arrows:
        return before[0]
    arrow = _find_arrow(layout, params, arrays) if arrows else None
    same = [each for each in arrows if arrow is not None and arrow.equals(each.pattern)]
    if same:
        return same[0]
    return replace(layout, pattern=_find(layout, params, arrays, most_dense))


def _find(
    layout: Layout, params: Array, arrays: list[Array], most_dense: int
) -> Pattern | None:
    order = layout.natural_order()
    probes, keys = sparsity.band_probes(order), random.split(random.key(0))
    at = keys, params, arrays, probes
    found = np.asarray(_probe(layout, None, *at))
    band = sparsity.find_band(order, found)
    if band.num_blocks > 1:
        return band
    lanes = _find_lanes(layout, params, arrays)
    if lanes:
        summed = Summed(lanes, band)
        of_sums = sparsity.find_band(order, np.asarray(_probe(layout, summed, *at)))
        if of_sums.num_blocks > 1:
            return replace(summed, band=of_sums)
    arrow = _find_arrow(layout, params, arrays)
    if arrow is not None:
        parts = _parts(replace(layout, pattern=arrow), keys, params, arrays)
        if sparsity.makes_up(arrow, jax.device_get(parts), found[:, 0]):
            return arrow
    return band if band.dim <= most_dense else None


def _find_lanes(
    layout: Layout, params: Array, arrays: list[Array]
) -> tuple[np.ndarray, ...]:
    """Find the sites with an axis as long as those that the model sums up along."""
    somewhere = jnp.zeros(layout.dim, layout.anchor.dtype)
    program = jax.make_jaxpr(layout.energy(arrays))(params, somewhere)
    lengths = set(_lengths_of_sums(program.jaxpr))
    values, found = layout.unravel_latents(layout.anchor), []
    for name, columns in layout.columns().items():
        shape = np.shape(values[name])
        axes = [axis for axis, length in enumerate(shape) if length in lengths]
        if axes and columns.size == np.prod(shape):
            lanes = np.moveaxis(columns.reshape(shape), axes[0], -1)
            found.append(lanes.reshape(-1, lanes.shape[-1]))
    # Components would no longer be independent of each other.
    owner = layout.partition.owner
    mixes = any(np.ptp(owner[lanes], axis=-1).any() for lanes in found)
    return () if mixes else tuple(found)


def _lengths_of_sums(jaxpr: Any) -> Iterator[int]:
    """Yield how many terms the cumulative sums of a program have."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cumsum":
            yield equation.invars[0].aval.shape[equation.params["axis"]]
        for inner in inner_programs(equation):
            yield from _lengths_of_sums(inner)


def _find_arrow(layout: Layout, params: Array, arrays: list[Array]) -> Arrow | None:
    """Find an arrow by the terms of the density, sites with many latents first."""
    somewhere = jnp.zeros(layout.dim, layout.anchor.dtype)
    members = find_members(layout.terms(arrays), params, somewhere)
    if members is None:
        return None
    sites = sorted(layout.columns().values(), key=len, reverse=True)
    return sparsity.find_arrow(members, np.concatenate(sites))


@compilation.program(static_argnums=(0, 1))
def _probe(
    layout: Layout,
    summed: Summed | None,
    keys: PRNGKey,
    params: Array,
    arrays: list[Array],
    probes: Array,
) -> Array:
    """Return products of the second derivative with some vectors, at draws of the prior."""
    energy = partial(layout.energy(arrays), params)

    def one(key: PRNGKey) -> Array:
        point = layout.draw_prior(key, params, arrays)
        if summed is None:
            return banded.products(energy, point, probes)
        return banded.products(summed.energy_of_sums(energy), summed.sums(point), probes)

    return jax.vmap(one)(keys)


@compilation.program(static_argnums=0)
def _parts(layout: Layout, keys: PRNGKey, params: Array, arrays: list[Array]) -> Parts:
    """Return second derivatives at draws of the prior."""
    assert isinstance(layout.pattern, Arrow)
    find, energy = layout.pattern.hessian, partial(layout.energy(arrays), params)
    return lax.map(lambda key: find(energy, layout.draw_prior(key, params, arrays)), keys)
