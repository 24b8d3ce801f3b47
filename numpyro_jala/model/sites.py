"""The sites of a NumPyro model: run it once, and read its trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import (
    ExpandedDistribution,
    ImproperUniform,
    Independent,
    MaskedDistribution,
    Unit,
)
from numpyro.primitives import Messenger

from numpyro_jala._typing import PRNGKey

Site: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Site]

_WRAPPERS = ("Independent", "ExpandedDistribution", "MaskedDistribution")


class SiteRecorder(Messenger):  # type: ignore[misc]
    """Remember the last named site, draws, and whether random numbers were asked for."""

    def __init__(self) -> None:
        super().__init__(None)
        self.last_site = ""
        self.drawn: dict[str, Any] = {}
        self.is_noisy = False

    def process_message(self, msg: Site) -> None:
        """See a site go by."""
        self.is_noisy |= msg["type"] == "prng_key"
        if msg["type"] in ("sample", "param", "deterministic"):
            self.last_site = msg["name"]

    def postprocess_message(self, msg: Site) -> None:
        """See what was drawn."""
        is_latent = msg["type"] == "sample" and not msg["is_observed"]
        if is_latent and not isinstance(msg["value"], jax.core.Tracer):
            self.drawn[msg["name"]] = msg["value"]


def run_once(
    model: Callable[..., Any],
    rng_key: PRNGKey,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Trace:
    """Run the model as it is, latents drawn from the prior."""
    feasible = handlers.substitute(model, substitute_fn=_improper_value)
    seeded = handlers.seed(feasible, rng_key)
    return dict(handlers.trace(seeded).get_trace(*args, **kwargs))


def _improper_value(site: Site) -> Any:
    """Return a feasible value where a prior cannot be drawn from, to refuse it later."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    if not isinstance(base_distribution(site["fn"]), ImproperUniform):
        return None
    return site["fn"].support.feasible_like(jnp.zeros(site["fn"].shape()))


def _layers(fn: Any) -> Iterator[Any]:
    """Yield a distribution, what it wraps, and so on."""
    yield fn
    while type(fn).__name__ in _WRAPPERS:
        fn = fn.base_dist
        yield fn


def base_distribution(fn: Any) -> Any:
    """Return what a distribution wraps."""
    return list(_layers(fn))[-1]


def is_masked(site: Site) -> bool:
    """Tell whether a mask takes some of the site's density away."""
    return any(isinstance(fn, MaskedDistribution) for fn in _layers(site["fn"]))


def without_mask(fn: Any) -> Any:
    """Return a distribution as it would be had nobody masked it."""
    if isinstance(fn, MaskedDistribution):
        return without_mask(fn.base_dist)
    if isinstance(fn, Independent):
        return without_mask(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, ExpandedDistribution):
        return without_mask(fn.base_dist).expand(fn.batch_shape)
    return fn


def num_masked(site: Site) -> Any:
    """Count the draws of a site whose density a mask takes away."""
    shape = site["fn"].batch_shape
    masks = [f._mask for f in _layers(site["fn"]) if isinstance(f, MaskedDistribution)]
    kept = jnp.ones(shape, bool)
    for mask in masks:
        kept &= jnp.broadcast_to(jnp.asarray(mask, bool), shape)
    return jnp.sum(~kept)


def is_scaled(site: Site) -> bool:
    """Tell whether the site's log-density is multiplied by other than one."""
    scale = site.get("scale")
    if scale is None or isinstance(scale, jax.core.Tracer):
        return scale is not None
    return bool(np.any(np.asarray(scale) != 1))


def in_control_flow(site: Site) -> bool:
    """Tell whether the site stands in the body of a scan or a cond."""
    return bool(site.get("_control_flow_done", False))


def latent_sites(trace: Trace) -> Trace:
    """Return the sample sites of a trace that are not observed."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def is_discrete(site: Site) -> bool:
    """Tell whether the values of a sample site can be counted."""
    return bool(site["fn"].support.is_discrete)


def is_integer(value: Any) -> bool:
    """Tell whether a param holds numbers that have no gradient."""
    leaves = [jnp.result_type(leaf) for leaf in jax.tree.leaves(value)]
    return not all(jnp.issubdtype(dtype, jnp.inexact) for dtype in leaves)


def is_factor(site: Site) -> bool:
    """Tell whether a sample site is a factor."""
    return isinstance(base_distribution(site["fn"]), Unit)


def is_data(site: Site) -> bool:
    """Tell whether a site is observed and not a factor."""
    return site["type"] == "sample" and site["is_observed"] and not is_factor(site)


def observed_data(trace: Trace) -> dict[str, np.ndarray]:
    """Return the values of observed sites, factors left out."""
    return {n: np.asarray(site["value"]) for n, site in trace.items() if is_data(site)}


def plate_depth(trace: Trace) -> int:
    """Return how many axes the plates of a model take."""
    dims = [
        -frame.dim
        for site in trace.values()
        for frame in site.get("cond_indep_stack", [])
        if frame.dim is not None
    ]
    return max(dims, default=0)


def describe_dims(trace: Trace, events: bool = True) -> dict[str, dict[int, Any]]:
    """Return the plates of each site: their names and sizes by axis, from the right.

    Without ``events`` for values such as log-densities, that have no event axes.
    """
    dims = {}
    for name, site in trace.items():
        event_dim = site["fn"].event_dim if events and site["type"] == "sample" else 0
        dims[name] = {
            frame.dim - event_dim: (frame.name, frame.size)
            for frame in site.get("cond_indep_stack", [])
        }
    return dims


def hold(model: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a model in which a param is the first argument, and no param any more."""

    def held(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fixed = handlers.substitute(model, {name: value})
        return handlers.block(fixed, hide=[name])(*args, **kwargs)

    return held
