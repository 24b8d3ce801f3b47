"""Refuse what cannot work, by name and value, before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Delta, ImproperUniform, MaskedDistribution

from numpyro_jala._typing import Array
from numpyro_jala.model import Trace, base_distribution, latent_sites
from numpyro_jala.resampling import SCHEMES

#: Share of equal draws that is not chance, even in single precision.
_HEAP = 0.02
PRECONDITIONERS = ("auto", "dense", "diagonal", None)


def check_options(
    num_particles: int,
    num_islands: int,
    step_size: float | None,
    preconditioner: str | None,
    resampling: str,
    ess_threshold: float,
) -> None:
    """Check the options of the constructor."""
    if num_islands < 1 or num_particles < 1 or num_particles % num_islands:
        raise ValueError(
            f"num_particles={num_particles} is not a multiple of num_islands="
            f"{num_islands}, and islands have equally many particles. Take "
            f"num_particles={max(1, num_particles // max(num_islands, 1)) * num_islands}."
        )
    if num_particles // num_islands < 2 and num_islands > 1:
        raise ValueError(
            f"num_particles={num_particles} in num_islands={num_islands} leaves one "
            "particle to an island, whose weights then say nothing. Take more particles."
        )
    if num_islands < 2 and (step_size is None or preconditioner is not None):
        what = "step_size=None" if step_size is None else f"{preconditioner=}"
        raise ValueError(
            f"{what} asks for adaptation, and num_islands={num_islands} leaves no other "
            "island to learn from: what adapts on the particles it moves biases the "
            "evidence. Take more islands, or give a step_size and preconditioner=None."
        )
    if step_size is not None and not step_size > 0:
        raise ValueError(f"step_size={step_size} is not positive.")
    if preconditioner not in PRECONDITIONERS:
        raise ValueError(f"{preconditioner=} is not one of {PRECONDITIONERS}.")
    if resampling not in SCHEMES:
        raise ValueError(f"{resampling=} is not one of {tuple(SCHEMES)}.")
    if not 0 <= ess_threshold <= 1:
        raise ValueError(
            f"ess_threshold={ess_threshold} is not between 0 (never resample) and 1."
        )


def check_sites(trace: Trace) -> None:
    """Check that the model has latents and data of kinds that can be handled."""
    latents = latent_sites(trace)
    observed = {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }
    if not latents:
        raise ValueError(
            f"The model has no latent sample site (its sites are {list(trace)}), so there "
            "is nothing to integrate out. If all of its unknowns are params, maximise "
            "the likelihood with an optimiser instead."
        )
    if not observed:
        raise ValueError(
            f"The model has no observed site and no factor (its sites are {list(trace)}), "
            "so its evidence is one whatever the parameters. Did you pass the data?"
        )
    for name, site in trace.items():
        size, subsample = site["args"] if site["type"] == "plate" else (0, None)
        if subsample not in (None, size):
            raise ValueError(
                f"Plate {name!r} subsamples {subsample} of {size}. The "
                "evidence needs all of the data: drop subsample_size."
            )
    for name, site in latents.items():
        _check_latent(name, site)
    for name, site in observed.items():
        _check_observed(name, site)


def _check_latent(name: str, site: dict[str, Any]) -> None:
    base = base_distribution(site["fn"])
    kind = type(base).__name__
    if site["fn"].support.is_discrete:
        raise ValueError(
            f"Latent site {name!r} is {kind}, which is discrete, and JALAEM moves latents "
            "along gradients. Sum the site out of the model, or condition on it."
        )
    if isinstance(base, ImproperUniform):
        raise ValueError(
            f"Latent site {name!r} has an improper prior, so the evidence is defined only "
            "up to a constant. Give it a proper prior, or make it a numpyro.param."
        )
    if isinstance(base, Delta):
        raise ValueError(
            f"Latent site {name!r} is a Delta, which has no density to move along. Make it "
            "a numpyro.param or a numpyro.deterministic."
        )


def _check_observed(name: str, site: dict[str, Any]) -> None:
    value = site["value"]
    if isinstance(value, jax.core.Tracer) or isinstance(site["fn"], MaskedDistribution):
        return
    bad = np.isnan(np.asarray(value, float))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"Observed site {name!r} holds {int(bad.sum())} NaN, the first at index "
            f"{where}, and a likelihood of NaN is NaN. Leave those rows out, or mask them "
            "with numpyro.handlers.mask."
        )


def check_init_params(values: dict[str, Any], constraints: dict[str, Any]) -> None:
    """Check that given starting values belong to params and satisfy their constraints."""
    unknown = sorted(set(values) - set(constraints))
    if unknown:
        raise ValueError(
            f"init_params names {unknown}, but the model's param sites are "
            f"{sorted(constraints)}."
        )
    for name, value in values.items():
        for leaf in jax.tree.leaves(value):
            if not bool(jnp.all(constraints[name](jnp.asarray(leaf, float)))):
                raise ValueError(
                    f"init_params[{name!r}] = {np.asarray(leaf)} lies outside the site's "
                    f"constraint {constraints[name]}."
                )


def describe_dead_start(trace: Trace) -> str:
    """Say which site has a non-finite log-density at a draw from the prior."""
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        log_prob = np.asarray(site["fn"].log_prob(site["value"]))
        if not np.isfinite(log_prob).all():
            value = np.asarray(site["value"]).reshape(-1)[:3]
            return (
                f"Site {name!r} has log-density {log_prob.sum()} at its value {value} "
                "under the starting parameters."
            )
    return "The gradient of the log-density is not finite at draws from the reference."


def find_heaps(values: dict[str, Array]) -> dict[str, float]:
    """Find sites many of whose prior draws lie at one value, by rounding.

    Close to the edge of its support a draw is rounded to the edge, or to the last number
    before it. A density cannot be computed beyond, and the mass there is missed.

    Parameters
    ----------
    values
        Unconstrained draws of each latent site, (num_draws, ...).

    Returns
    -------
    dict
        The site's largest share of draws that equal another one.
    """
    heaps = {}
    for name, value in values.items():
        ordered = np.sort(np.asarray(value).reshape(len(value), -1), axis=0)
        share = np.mean(np.diff(ordered, axis=0) == 0, axis=0).max(initial=0.0)
        if share > _HEAP:
            heaps[name] = float(share)
    return heaps


def check_can_anneal(num_islands: int, preconditioner: str | None) -> None:
    """Check that the temperatures can be chosen by other islands."""
    if num_islands < 2 or preconditioner is None:
        raise ValueError(
            f"Annealing chooses temperatures from other islands and adapts its moves, "
            f"but num_islands={num_islands} and {preconditioner=}. Give init_particles "
            "and init_log_evidence, or take more islands and preconditioner='auto'."
        )


def check_particles(
    particles: dict[str, Any], latents: tuple[str, ...], num_particles: int
) -> None:
    """Check that given particles name every latent, with the right leading axis."""
    if set(particles) != set(latents):
        raise ValueError(
            f"init_particles names {sorted(particles)}, but the model's latent sites are "
            f"{sorted(latents)}."
        )
    for name, value in particles.items():
        if np.shape(value)[:1] != (num_particles,):
            raise ValueError(
                f"init_particles[{name!r}] has shape {np.shape(value)}, but its leading "
                f"axis must be num_particles={num_particles}."
            )
