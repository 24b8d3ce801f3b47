"""Help NumPyro to sum discrete latents out, and check that it does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.model.density import Layout
from numpyro_jala.model.sites import (
    Site,
    Trace,
    in_control_flow,
    is_masked,
    num_masked,
)

_MOST_ASSIGNMENTS = 64
#: Draws from the prior at which masks are looked at.
_NUM_LOOKS = 8


class OwnInfer(Messenger):  # type: ignore[misc]
    """Give each site an ``infer`` dictionary of its own.

    NumPyro's scans and enumeration write into it, and a model may share one among sites.
    """

    def process_message(self, msg: Site) -> None:
        """Copy what the site was given, also in the body of a scan, which hides its sites."""
        if msg["type"] == "sample":
            msg["infer"] = dict(msg["infer"])
        if msg["type"] == "control_flow":
            msg["args"] = tuple(
                OwnInfer(each) if callable(each) else each for each in msg["args"]
            )


def check_sum(layout: Layout, trace: Trace, arrays: list[Array]) -> None:
    """Check the sum over discrete latents outside of a scan that has some within.

    They may be where the chain within begins. In the body NumPyro would sum them out
    anew at each step, as if they were drawn anew, which is another model.
    """
    outside = [name for name in layout.discrete if not in_control_flow(trace[name])]
    inside = tuple(name for name in layout.discrete if name not in outside)
    if not outside or not inside:
        return
    beyond = f"Discrete latents {outside} stand outside of a scan that holds {list(inside)}"
    sites = [trace[name] for name in outside]
    if math.prod(map(_num_assignments, sites)) > _MOST_ASSIGNMENTS:
        raise ValueError(
            f"{beyond}, and take more than {_MOST_ASSIGNMENTS} values together: too many "
            "to check whether NumPyro sums them out rightly. Draw them in its body."
        )
    if isinstance(layout.anchor, jax.core.Tracer):
        raise ValueError(
            f"{beyond}, and whether NumPyro sums them out rightly has to be seen before "
            "anything is compiled. Call run, outside of jax.jit and jax.vmap."
        )
    at = layout.init_params, jnp.ones((), layout.anchor.dtype), layout.anchor

    @partial(jax.jit, compiler_options=compilation.QUICK)
    def log_joint(values: tuple[np.ndarray, ...]) -> Array:
        known = dict(zip(outside, values, strict=True))
        model = handlers.condition(layout.model, data=known)
        return -replace(layout, model=model, discrete=inside).joint(arrays)(*at)

    values = itertools.product(*map(_assignments, sites))
    by_hand = logsumexp(jnp.stack([log_joint(each) for each in values]))
    found = -jax.jit(layout.joint(arrays), compiler_options=compilation.QUICK)(*at)
    if not np.allclose(found, by_hand, rtol=1e-5, atol=1e-3, equal_nan=True):
        raise ValueError(
            f"{beyond}, and its body depends on them. NumPyro then sums them out anew at "
            "each step, which is another model. Draw them in the body, at every step the "
            "value of the step before with probability one."
        )


def check_masks(layout: Layout, trace: Trace, arrays: list[Array]) -> None:
    """Check that a mask takes the same away from discrete latents whatever is drawn.

    A masked draw has no prior, and the sum counts each of its values. Where the mask
    depends on latents, so does the mass of the prior, which is then not known.
    """
    masked = [name for name in layout.discrete if is_masked(trace[name])]
    if not masked:
        return

    def count(rng_key: PRNGKey) -> dict[str, Array]:
        sites = layout.trace(rng_key, layout.init_params, arrays)
        return {name: num_masked(sites[name]) for name in masked}

    for name, counts in jax.vmap(count)(random.split(random.key(0), _NUM_LOOKS)).items():
        if not isinstance(counts, jax.core.Tracer) and np.ptp(counts) > 0:
            raise ValueError(
                f"Discrete latent {name!r} has a mask that depends on latents, so that the "
                "mass of its prior does, and the evidence is not defined. Where there is "
                "nothing to draw, give one value probability one; mask the observed "
                "sites alone."
            )


def _values(site: Site) -> np.ndarray:
    """Return the values that one draw can take, with a leading axis."""
    fn = site["fn"]
    return np.asarray(fn.enumerate_support(expand=False)).reshape(-1, *fn.event_shape)


def _num_draws(site: Site) -> int:
    return int(np.size(site["value"]) // math.prod(site["fn"].event_shape))


def _num_assignments(site: Site) -> int:
    return len(_values(site)) ** _num_draws(site)


def _assignments(site: Site) -> Iterator[np.ndarray]:
    """Yield every value of a site, draw by draw."""
    values = _values(site)
    for index in itertools.product(range(len(values)), repeat=_num_draws(site)):
        yield np.reshape(values[list(index)], np.shape(site["value"]))
