r"""Coordinates of latents whose prior has a scale that depends on other latents.

Effects :math:`u_g \sim N(\mu, \tau^2)` with a latent :math:`\tau` form a funnel: where
:math:`\tau` is small the effects have next to no room, and no step size fits there and
elsewhere. Particles move in the standard ones, :math:`z_g = (u_g - \mu) / \tau`, the
non-centred parametrisation (Papaspiliopoulos, Roberts and Sköld 2007). It is a change of
variables: the evidence is the same, and results hold the :math:`u_g`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.interpreters import partial_eval
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer.util import _unconstrain_reparam

from numpyro_jala._typing import Array
from numpyro_jala.model.sites import Site, Trace, is_masked, run_once

_LOC_SCALE = (dist.Normal, dist.LogNormal, dist.Laplace, dist.Logistic, dist.Cauchy)


class _Standard(NamedTuple):
    """A prior as a transform of a distribution without a scale."""

    fn: Any
    scale: Array
    forward: Callable[[Array], Array]  # from standard to unconstrained coordinates
    inverse: Callable[[Array], Array]


def _standard(fn: Any) -> _Standard | None:
    """Write a distribution as that of a transformed standard one, if it is known how."""
    while isinstance(fn, (dist.Independent, dist.ExpandedDistribution)):
        fn = fn.base_dist
    if isinstance(fn, dist.GaussianRandomWalk):
        width = jnp.asarray(fn.scale)[..., None]
        return _Standard(
            dist.Normal(),
            fn.scale,
            lambda z: width * jnp.cumsum(z, -1),
            lambda x: jnp.diff(x, axis=-1, prepend=jnp.zeros_like(x[..., :1])) / width,
        )
    if isinstance(fn, dist.MultivariateNormal):
        return _Standard(
            dist.Normal(),
            fn.scale_tril,
            lambda z: fn.loc + (fn.scale_tril @ z[..., None])[..., 0],
            lambda x: _solve(fn.scale_tril, x - fn.loc),
        )
    if isinstance(fn, dist.StudentT):
        standard: Any = dist.StudentT(fn.df)
    elif isinstance(fn, _LOC_SCALE):
        standard = dist.Normal() if isinstance(fn, dist.LogNormal) else type(fn)()
    else:
        return None
    return _Standard(
        standard,
        fn.scale,
        lambda z: fn.loc + fn.scale * z,
        lambda x: (x - fn.loc) / fn.scale,
    )


def _solve(factor: Array, away: Array) -> Array:
    shape = jnp.broadcast_shapes(factor.shape[:-2], away.shape[:-1])
    factor = jnp.broadcast_to(factor, (*shape, *factor.shape[-2:]))
    column = jnp.broadcast_to(away, (*shape, away.shape[-1]))[..., None]
    return jax.scipy.linalg.solve_triangular(factor, column, lower=True)[..., 0]


def find_scaled(model: Callable[..., Any], trace: Trace, latents: Trace) -> tuple[str, ...]:
    """Find the latents whose prior has a scale that depends on other latents.

    ``model`` takes no arguments. A mask or a scale of the density counts a latent in
    another way than once, and leaves it as it is.
    """
    known = {
        name: site
        for name, site in latents.items()
        if _standard(site["fn"]) is not None
        and not is_masked(site)
        and site["scale"] is None
    }
    fixed = {n: site["value"] for n, site in trace.items() if site["type"] == "param"}
    if not known:
        return ()

    def scales(values: dict[str, Array]) -> dict[str, Array]:
        given = handlers.substitute(model, data={**fixed, **values})
        sites = run_once(given, jax.random.key(0), (), {})
        found = {name: _standard(sites[name]["fn"]) for name in known}
        return {name: each.scale for name, each in found.items() if each is not None}

    values = {name: jnp.asarray(site["value"]) for name, site in latents.items()}
    program = jax.make_jaxpr(scales)(values).jaxpr
    names = sorted(known)
    return tuple(
        name
        for name in names
        if any(partial_eval.dce_jaxpr(program, [each == name for each in names])[1])
    )


def coordinates(site: Site, scaled: tuple[str, ...]) -> Array:
    """Map the value of a latent site to where its particles move."""
    free = biject_to(site["fn"].support).inv(site["value"])
    standard = _standard(site["fn"]) if site["name"] in scaled else None
    return free if standard is None else standard.inverse(free)


def place(
    free: dict[str, Array], scaled: tuple[str, ...], site: Site, counts: bool = True
) -> Any:
    """Map coordinates to the value of a latent site, and count the change of volume."""
    name = site["name"]
    if name not in free or site["type"] != "sample":
        return None
    standard = _standard(site["fn"]) if name in scaled else None
    if standard is None:
        if counts:
            return _unconstrain_reparam(free, site)
        return biject_to(site["fn"].support)(free[name])
    z, fn = free[name], site["fn"]
    index = site["infer"].get("_scan_current_index")
    if index is not None and jnp.ndim(z) > len(fn.shape()):
        z = z[index]  # a scan is at one of its steps
    value = biject_to(fn.support)(standard.forward(z))
    if counts:
        log_density = sum_rightmost(standard.fn.log_prob(z), fn.event_dim)
        numpyro.factor(f"_{name}_log_det", log_density - fn.log_prob(value))
    return value
