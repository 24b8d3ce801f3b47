"""Refuse models that cannot work, by site and value, before anything is compiled."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Delta, ImproperUniform, biject_to, constraints

from numpyro_jala._typing import Array
from numpyro_jala.backend.columns import over_columns
from numpyro_jala.model.density import Layout
from numpyro_jala.model.sites import (
    Site,
    Trace,
    base_distribution,
    in_control_flow,
    is_data,
    is_discrete,
    is_integer,
    is_masked,
    is_scaled,
    latent_sites,
    num_masked,
    run_once,
)

#: What JAX raises where NumPy asks a traced value for its numbers.
NUMPY_MET_TRACER = (
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
#: Draws that are named where a model fails.
_MOST_DRAWS = 4
#: Share of equal draws that is not chance, even in single precision.
_TIED = 0.02
#: Change of an unconstrained latent on its way to the model and back that is more than
#: inexact.
_MOVED = 0.1


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
            "the likelihood with an optimiser. To compare it with models that have latents, "
            "add one on which nothing depends: numpyro.sample('unused', dist.Normal())."
        )
    if not observed:
        raise ValueError(
            f"The model has no observed site and no factor (its sites are {list(trace)}), "
            "so its evidence is one whatever the parameters. Did you pass the data?"
        )
    for name, site in trace.items():
        _check_other(name, site)
    for name, site in latents.items():
        _check_latent(name, site)
    if all(is_discrete(site) for site in latents.values()):
        raise ValueError(
            f"All latent sites are discrete ({list(latents)}) and can be summed out, so "
            "the likelihood is known exactly: maximise it with an optimiser instead."
        )
    for name, site in observed.items():
        _check_observed(name, site)


def _check_other(name: str, site: Site) -> None:
    """Check plates, params and states."""
    if site["type"] == "plate":
        size, subsample = site["args"]
        if subsample not in (None, size):
            raise ValueError(
                f"Plate {name!r} subsamples {subsample} of {size}. The "
                "evidence needs all of the data: drop subsample_size."
            )
    if site["type"] == "mutable":
        raise ValueError(
            f"Site {name!r} is a mutable state, such as the running means of a batch "
            "normalisation. It changes with every evaluation, so there is no one density "
            "to integrate. Use a module without state."
        )
    if site["type"] == "param":
        _check_param(name, site)


def _check_param(name: str, site: Site) -> None:
    if in_control_flow(site):
        raise ValueError(
            f"Param {name!r} stands in the body of a scan or cond, where NumPyro gives it "
            "its initial value and no gradient. Declare it before, outside of the body."
        )
    support = site["kwargs"].get("constraint", constraints.real)
    if is_integer(site["value"]):
        return
    try:
        transform = biject_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"Param {name!r} has the constraint {support}, which cannot be mapped to the "
            "real line. Write the param as a function of one that can."
        ) from error
    for leaf in jax.tree.leaves(site["value"]):
        if isinstance(leaf, jax.core.Tracer):
            continue
        with jax.ensure_compile_time_eval():
            inside = jnp.all(support(leaf)) & jnp.isfinite(leaf).all()
            inside &= jnp.isfinite(transform.inv(leaf)).all()
        if not inside:
            raise ValueError(
                f"Param {name!r} starts at {np.asarray(leaf)}, outside or at the edge of "
                f"its constraint {support}. Start it inside."
            )


def _check_latent(name: str, site: Site) -> None:
    base = base_distribution(site["fn"])
    if is_discrete(site):
        _check_discrete(name, site)
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
    if is_scaled(site):
        raise ValueError(
            f"Latent site {name!r} is scaled by {site['scale']}, and a prior to a power "
            "has no known mass. Take the scale off, or scale the observed sites alone."
        )
    if not is_discrete(site):
        try:
            biject_to(site["fn"].support)
        except NotImplementedError as error:
            raise ValueError(
                f"Latent site {name!r} ({type(base).__name__}) has support "
                f"{site['fn'].support}, which cannot be mapped to the real line. "
                "Reparametrise it: see numpyro.infer.reparam."
            ) from error


def _check_discrete(name: str, site: Site) -> None:
    kind = type(base_distribution(site["fn"])).__name__
    if not site["fn"].has_enumerate_support:
        raise ValueError(
            f"Latent site {name!r} is {kind}, which is discrete and without end, so it "
            "cannot be summed out. Truncate it to a Categorical, or condition on it."
        )
    if importlib.util.find_spec("funsor") is None:
        raise ValueError(
            f"Latent site {name!r} is {kind}, which is discrete, and to sum it out takes "
            "funsor: pip install numpyro_jala[enum]. Or condition on the site."
        )


def _check_observed(name: str, site: Site) -> None:
    value = site["value"]
    if is_data(site):
        _check_shapes(name, np.shape(value), tuple(site["fn"].shape()))
    if isinstance(value, jax.core.Tracer) or is_masked(site):
        return
    bad = np.isnan(np.asarray(value, float))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"Observed site {name!r} holds {int(bad.sum())} NaN, the first at index "
            f"{where}, and a likelihood of NaN is NaN. Leave those rows out, or mask them "
            "with numpyro.handlers.mask."
        )


def _check_shapes(name: str, seen: tuple[int, ...], shape: tuple[int, ...]) -> None:
    try:
        np.broadcast_shapes(seen, shape)
    except ValueError as error:
        raise ValueError(
            f"Observed site {name!r} has shape {seen}, and its distribution {shape}. Are "
            "there as many data as the model expects?"
        ) from error


def model_warnings(trace: Trace, is_noisy: bool) -> list[str]:
    """Return a sentence for each thing that changes what the numbers mean."""
    said = [sentence for n, site in trace.items() for sentence in _site_warnings(n, site)]
    if is_noisy:
        said.append(
            "The model asks for random numbers beside its sites (prng_key, dropout). They "
            "are drawn once and held, so the result is that of one network with some "
            "units dropped. Turn dropout off."
        )
    return said


def _site_warnings(name: str, site: Site) -> list[str]:
    if site["type"] == "param" and is_integer(site["value"]):
        return [
            f"Param {name!r} is an integer and has no gradient: it stays at "
            f"{site['value']}. Start it at a float to estimate it."
        ]
    if site["type"] == "param" and name.endswith("_centered"):
        return [
            f"Param {name!r} belongs to a LocScaleReparam that learns how to centre. The "
            "likelihood does not depend on it, and it counts as a parameter in AIC and "
            "BIC. Give LocScaleReparam centered=0 or 1."
        ]
    if is_data(site) and is_scaled(site):
        return [
            f"Observed site {name!r} is scaled by {site['scale']}: the log-evidence is "
            "that of a likelihood to a power, not of the data. Compare it only with models "
            "scaled alike, and do not trust the standard errors."
        ]
    if site["type"] == "sample" and not site["is_observed"] and is_discrete(site):
        return _masked_discrete(name, site)
    if is_data(site):
        return _broadcast(name, np.shape(site["value"]), tuple(site["fn"].shape()))
    return []


def _masked_discrete(name: str, site: Site) -> list[str]:
    count = num_masked(site)
    if isinstance(count, jax.core.Tracer) or not count:
        return []
    num_values = len(site["fn"].enumerate_support(expand=False))
    mass = int(count) * np.log(num_values)
    return [
        f"Of discrete latent {name!r} {int(count)} draws are masked: they have no prior, and "
        f"each of their {num_values} values counts in the sum, so that the prior sums to "
        f"exp({mass:.2f}) and not to one. Compare the log-evidence only with models masked "
        "alike. To have a proper prior, mask the observed sites alone."
    ]


def _broadcast(name: str, seen: tuple[int, ...], shape: tuple[int, ...]) -> list[str]:
    together = np.broadcast_shapes(seen, shape)
    if np.prod(together) == np.prod(seen):
        return []
    return [
        f"Observed site {name!r} has shape {seen} and its distribution {shape}: together "
        f"{together}, so that data count more than once. If that is not meant, mend the "
        "shapes."
    ]


def is_dead(trace: Trace) -> bool:
    """Tell whether a draw from the prior has a non-finite log-density."""
    sites = [site for site in trace.values() if site["type"] == "sample"]
    logs = [site["fn"].log_prob(site["value"]) for site in sites]
    return not all(bool(jnp.isfinite(each).all()) for each in logs)


def describe_dead_start(trace: Trace) -> str:
    """Say which site has a non-finite log-density at a draw from the prior."""
    site = _dead_site(trace)
    if site:
        return f"S{site[1:]} under the starting parameters."
    return "The gradient of the log-density is not finite at draws from the reference."


def _dead_site(trace: Trace) -> str:
    """Name the first site with a non-finite log-density, by its value; empty if none has."""
    for name, site in trace.items():
        if site["type"] != "sample":
            continue
        log_prob = np.asarray(site["fn"].log_prob(site["value"]))
        if not np.isfinite(log_prob).all():
            return f"site {name!r} has log-density {_first_dead(log_prob, site['value'])}"
    return ""


def _first_dead(log_prob: np.ndarray, value: Any) -> str:
    """Write the first log-density that is not finite, and where it is."""
    index = tuple(map(int, np.argwhere(~np.isfinite(log_prob))[0]))
    value = np.asarray(value)
    if value.shape[: log_prob.ndim] == log_prob.shape and value.size:
        value = value[index]
    else:
        value = value.reshape(-1)[:3]
    place = f" at the index {index}," if index else ""
    at = f" at its value {value}" if value.size else ""
    return f"{log_prob[index]}{place}{at}".rstrip(",")


def describe_dead_place(
    layout: Layout,
    params: Array,
    position: Array,
    arrays: list[Array],
    gradient: np.ndarray,
) -> str:
    """Say which site has a non-finite log-density at a position, and at which latents."""
    bad = [layout.label(int(i)) for i in np.flatnonzero(~np.isfinite(gradient))]
    found = "the log-density is not finite"
    if bad:
        found = f"its gradient by {', '.join(bad[:_MOST_DRAWS])} is not finite"
    if layout.discrete:  # summed out: there is no one value to look at
        return f"{found}."
    latents = layout.constrain(jax.random.key(0), params, position, arrays)
    latents = {name: latents[name] for name in layout.latents}
    args, kwargs = layout.call.fill(arrays)
    fixed = handlers.substitute(layout.at(params), data=latents)
    site = _dead_site(run_once(fixed, jax.random.key(0), args, kwargs))
    shown = {name: latents[name] for name in list(latents)[:_MOST_DRAWS]}
    return f"{site or found}, where {describe_values(shown)}."


def find_tied_draws(draws: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Find sites many of whose prior draws lie at one value, by rounding.

    Close to the edge of its support a draw is rounded to the edge, or to the last number
    before it. A density cannot be computed beyond, and the mass there is missed.

    Parameters
    ----------
    draws
        Unconstrained latents, (num_draws, dim).
    columns
        Those of each latent site.

    Returns
    -------
    dict
        The site's largest share of draws that equal another one.
    """

    def count(part: np.ndarray) -> np.ndarray:
        ordered = np.sort(np.ascontiguousarray(part.T))
        found: np.ndarray = np.sum(ordered[:, 1:] == ordered[:, :-1], 1)
        return found

    counts = over_columns(count, draws)
    # Of a million numbers two are the same by chance, and more in one of many columns.
    by_chance = 1 + np.log10(draws.shape[1]) // 2
    shares = np.where(counts > by_chance, counts, 0) / max(1, len(draws) - 1)
    worst = {name: shares[index].max(initial=0.0) for name, index in columns.items()}
    return {name: float(share) for name, share in worst.items() if share > _TIED}


def find_lost(trace: Trace, layout: Layout, position: np.ndarray) -> dict[str, float]:
    """Find sites whose particles reach to where the precision has no numbers for them.

    Parameters
    ----------
    position
        Of particles, (num_particles, dim).

    Returns
    -------
    dict
        The nats that all entries of a site lose about, where they lose any.
    """
    shapes, found = layout.unravel_latents(layout.anchor), {}
    for name, index in layout.columns().items():
        support, shape = trace[name]["fn"].support, np.shape(shapes[name])
        lost = _below(support, position[:, index])
        if index.size == np.prod(shape) and not _has_no_upper_end(support):
            lost += _next_to_edge(support, position[:, index].reshape(-1, *shape))
        if lost:
            found[name] = lost
    return found


def _next_to_edge(support: Any, free: np.ndarray) -> float:
    """Add up the shares of particles that are too near an edge for the precision.

    From an interval or a simplex they do not come back to where they were: the model was
    given another value, and its density there is another one.
    """
    transform, at = biject_to(support), jnp.asarray(free)
    change = np.abs(transform.inv(transform(at)) - at)
    return float(np.mean(~(change < _MOVED), axis=0).sum())


def _below(support: Any, free: np.ndarray) -> float:
    """Return what lies below the smallest number, by the tail above it.

    Near zero a posterior mostly is a power, so that the share there is the square of the
    share below the number's root.
    """
    half = 0.5 * np.log(np.finfo(free.dtype).tiny)
    share = float(np.mean(free < half)) if free.size else 0.0
    return free.shape[1] * share**2 if share and _vanishes(support) else 0.0


def _vanishes(support: Any) -> bool:
    """Tell whether values go to zero as the exponential of their coordinate does."""
    transform = biject_to(getattr(support, "base_constraint", support))
    if transform.domain.event_dim or transform.codomain.event_dim:
        return False
    far, further = map(float, transform(jnp.array([-50.0, -60.0])))
    return bool(np.isclose(further, far * np.exp(-10.0), rtol=0.01, atol=0.0))


def _has_no_upper_end(support: Any) -> bool:
    """Tell whether numbers near the ends of a support are as exact as others."""
    support = getattr(support, "base_constraint", support)
    return any(
        support is known or isinstance(support, type(known))
        for known in (constraints.real, constraints.positive, constraints.real_vector)
    )


def describe_failure(
    error: Exception, last_site: str, drawn: dict[str, Any], not_finite: str
) -> str:
    """Say that the model itself failed, where, and at which draws from the prior."""
    cause = f"{type(error).__name__}: {error}"
    if isinstance(error, NUMPY_MET_TRACER):
        cause = (
            "in the body of a scan or a cond NumPy was given a value that JAX traces, as the "
            "index of a NumPy array or to a function of NumPy. Use jax.numpy there, and "
            "jnp.asarray(data) for data."
        )
    said = (
        f"The model, run once on the given arguments before anything else, failed: {cause}"
    )
    if not_finite:
        said += f" {not_finite}"
    if not last_site:
        return said
    said += f" This was after site {last_site!r}"
    last = {name: drawn[name] for name in list(drawn)[-_MOST_DRAWS:]}
    return said + (f", at the draws {describe_values(last)}." if last else ".")


def describe_values(values: dict[str, Any]) -> str:
    """Write named arrays, the longer ones in part."""
    texts = {
        name: np.array2string(np.asarray(leaf), precision=4, threshold=6)
        for name, value in values.items()
        for leaf in jax.tree.leaves(value)[:1]
    }
    return ", ".join(f"{name} = {' '.join(text.split())}" for name, text in texts.items())
