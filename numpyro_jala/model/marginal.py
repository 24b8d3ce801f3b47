"""The log-density of a model whose discrete latents are summed out, and its terms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.model.sites import Site
from numpyro_jala.model.summands import mark, take_apart

Model = Callable[..., Any]


class Mark(Messenger):  # type: ignore[misc]
    """Mark the log-probability of each site by its name, where the sites are added up."""

    def process_message(self, msg: Site) -> None:
        """Multiply the scale by a one that bears the name."""
        if msg["type"] == "sample":
            one = mark(jnp.ones(()), msg["name"])
            msg["scale"] = one if msg.get("scale") is None else one * msg["scale"]


def sum_out(model: Model, enum_dim: int) -> Model:
    """Return the model with its discrete latents summed out."""
    from numpyro.contrib.funsor import config_enumerate, enum

    return enum(config_enumerate(model), enum_dim)


def log_density(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
    """Return the log-density of a model whose discrete latents are summed out."""
    from numpyro.contrib import funsor

    return funsor.log_density(model, args, kwargs, {})[0]


def terms(model: Callable[[], Any]) -> list[Array]:
    """Return the terms of that log-density: what is left of each site, or of several."""

    def total() -> Array:
        with Mark():
            return log_density(model, (), {})

    return take_apart(jax.make_jaxpr(total)())


def is_tempered(site: Site, jacobians: Collection[str]) -> bool:
    """Tell whether a site is no part of the prior, which has the latents' Jacobians."""
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    # Where discrete latents are summed out, a scan calls its first sites by this.
    return site["name"].replace("_PREV_", "") not in jacobians


def prior_of(model: Model, jacobians: Collection[str]) -> Model:
    """Return the model without the sites that are no part of the prior."""
    return handlers.block(model, hide_fn=lambda site: is_tempered(site, jacobians))


def draw_discrete(model: Model, enum_dim: int, rng_key: PRNGKey) -> Model:
    """Draw discrete latents given everything else."""
    from numpyro.contrib.funsor import config_enumerate, infer_discrete

    return infer_discrete(
        config_enumerate(model), first_available_dim=enum_dim, rng_key=rng_key
    )
