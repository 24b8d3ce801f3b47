"""From a NumPyro model and its data to potentials, reference draws and transforms.

This file alone knows NumPyro's handlers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import ImproperUniform, Unit, biject_to, constraints
from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger

from numpyro_jala._typing import Array, Potential, PRNGKey, Tree
from numpyro_jala.call import Call, split_call

Trace = dict[str, dict[str, Any]]
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Temper(Messenger):  # type: ignore[misc]
    """Raise everything in the joint density but the prior to the power ``temperature``.

    The prior is what ancestral sampling draws: latent sites and the Jacobians of their
    transforms, which :func:`numpyro.infer.util.potential_energy` adds as factors.
    """

    def __init__(self, temperature: Array, latents: tuple[str, ...]) -> None:
        super().__init__(None)
        self.temperature = temperature
        self.jacobians = {f"_{name}_log_det" for name in latents}

    def process_message(self, msg: dict[str, Any]) -> None:
        """Multiply the scale of observed sites and factors."""
        is_likelihood = msg["type"] == "sample" and msg["is_observed"]
        if is_likelihood and msg["name"] not in self.jacobians:
            scale = msg.get("scale")
            msg["scale"] = self.temperature if scale is None else scale * self.temperature


class Unobserve(Messenger):  # type: ignore[misc]
    """Draw the observed sites anew."""

    def process_message(self, msg: dict[str, Any]) -> None:
        """Forget what was observed."""
        if msg["type"] == "sample" and msg["is_observed"] and not _is_factor(msg):
            msg["is_observed"], msg["value"] = False, None


@dataclass(frozen=True, eq=False)
class Layout:
    """The sites of a model, and how they lie in flat vectors.

    Compared by identity: compiled functions take it as a fixed argument, and the data
    apart from it.
    """

    model: Callable[..., Any]
    call: Call
    latents: tuple[str, ...]
    constraints: dict[str, Any]
    init_params: Array  # (num_params,), unconstrained
    is_free: np.ndarray  # (num_params,), unconstrained in truth
    unravel_params: Callable[[Array], dict[str, Tree]]
    unravel_position: Callable[[Array], dict[str, Array]]
    dim: int

    def constrain_params(self, params: Array) -> dict[str, Tree]:
        """Map a flat unconstrained vector to values of the param sites."""
        free = self.unravel_params(params)
        return {
            name: jax.tree.map(biject_to(self.constraints[name]), value)
            for name, value in free.items()
        }

    def unconstrain_params(self, values: dict[str, Tree]) -> Array:
        """Map values of the param sites to a flat unconstrained vector."""
        return _strong(ravel_pytree(unconstrain(values, self.constraints))[0])

    def _at(self, params: Array) -> Callable[..., Any]:
        return handlers.substitute(self.model, data=self.constrain_params(params))

    def joint(self, arrays: list[Array]) -> Potential:
        """Return the potential that goes from the prior to the joint density."""
        args, kwargs = self.call.fill(arrays)

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            latents = self.unravel_position(position)
            with Temper(temperature, self.latents):
                return potential_energy(self._at(params), args, kwargs, latents)

        return potential

    def trace(self, rng_key: PRNGKey, params: Array, arrays: list[Array]) -> Trace:
        """Run the model once at the given parameters, latents drawn from the prior."""
        args, kwargs = self.call.fill(arrays)
        seeded = handlers.seed(self._at(params), rng_key)
        return dict(handlers.trace(seeded).get_trace(*args, **kwargs))

    def draw_prior(self, rng_key: PRNGKey, params: Array, arrays: list[Array]) -> Array:
        """Draw one unconstrained position from the prior at the given parameters."""
        sites = self.trace(rng_key, params, arrays)
        return ravel_pytree({name: _unconstrained(sites[name]) for name in self.latents})[0]

    def _replay(
        self,
        rng_key: PRNGKey,
        params: Array,
        position: Array,
        arrays: list[Array],
        inner_fn: Callable[..., Any] = lambda model: model,
    ) -> Trace:
        """Run the model at one position; a support may depend on params or latents."""
        args, kwargs = self.call.fill(arrays)
        free = self.unravel_position(position)

        def value_of(site: dict[str, Any]) -> Any:
            if site["type"] == "sample" and site["name"] in free:
                return biject_to(site["fn"].support)(free[site["name"]])
            return None

        # What un-observes a site must stand within what seeds it.
        inner = inner_fn(self._at(params))
        replayed = handlers.substitute(inner, substitute_fn=value_of)
        seeded = handlers.seed(replayed, rng_key)
        return dict(handlers.trace(seeded).get_trace(*args, **kwargs))

    def constrain(
        self, params: Array, position: Array, arrays: list[Array]
    ) -> dict[str, Array]:
        """Map one position to the values of latent and deterministic sites."""
        sites = self._replay(jax.random.key(0), params, position, arrays)
        return {
            name: site["value"]
            for name, site in sites.items()
            if name in self.latents or site["type"] == "deterministic"
        }

    def predict(
        self, rng_key: PRNGKey, params: Array, position: Array, arrays: list[Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Draw the observed sites at one position, and weigh what was observed there."""
        sites = self._replay(rng_key, params, position, arrays)
        seen = {name: site for name, site in sites.items() if _is_data(site)}
        log_likelihood = {n: site["fn"].log_prob(site["value"]) for n, site in seen.items()}
        drawn = self._replay(rng_key, params, position, arrays, Unobserve)
        return {name: drawn[name]["value"] for name in seen}, log_likelihood

    def unconstrain(
        self, params: Array, values: dict[str, Array], arrays: list[Array]
    ) -> Array:
        """Map constrained latents of one particle to a position."""
        args, kwargs = self.call.fill(arrays)
        fixed = handlers.substitute(self._at(params), data=values)
        seeded = handlers.seed(fixed, jax.random.key(0))
        sites = handlers.trace(seeded).get_trace(*args, **kwargs)
        return ravel_pytree({name: _unconstrained(sites[name]) for name in self.latents})[0]


#: Most entries of a constrained param that are looked at one by one.
_MOST_INSPECTED = 64


def _free_coordinates(values: dict[str, Tree], supports: dict[str, Any]) -> np.ndarray:
    """Tell which coordinates a param is linear in, and which are logarithms or such."""

    def inspect(support: Any, leaf: Array) -> np.ndarray:
        shape, size = jnp.shape(leaf), int(np.prod(jnp.shape(leaf)))
        if support is constraints.real or size > _MOST_INSPECTED:
            return np.full(shape, support is constraints.real)
        transform = biject_to(support)

        def bend(direction: np.ndarray) -> Array:
            def slope(x: Array) -> Array:
                return jax.jvp(transform, (x,), (jnp.asarray(direction),))[1]

            place = jnp.full(shape, 0.3)
            return jax.jvp(slope, (place,), (jnp.asarray(direction),))[1]

        directions = np.eye(size).reshape(size, *shape)
        with jax.ensure_compile_time_eval():
            bends = [float(jnp.max(jnp.abs(bend(each)))) for each in directions]
        return np.reshape(bends, shape) == 0

    found = {
        name: jax.tree.map(lambda leaf, n=name: inspect(supports[n], leaf), value)
        for name, value in values.items()
    }
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(found)]
    return np.concatenate([np.zeros(0, bool), *leaves])


def _strong(values: Array) -> Array:
    """Fix the type of numbers that Python gave, or a loop would be compiled twice."""
    return jnp.asarray(values, values.dtype)


def _unconstrained(site: dict[str, Any]) -> Array:
    return biject_to(site["fn"].support).inv(site["value"])


def unconstrain(values: dict[str, Tree], supports: dict[str, Any]) -> dict[str, Tree]:
    """Map each site's value, a tree, to the real line."""
    return {
        name: jax.tree.map(biject_to(supports[name]).inv, value)
        for name, value in values.items()
    }


def latent_sites(trace: Trace) -> Trace:
    """Return the sample sites of a trace that are not observed."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


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


def base_distribution(fn: Any) -> Any:
    """Return what a distribution wraps."""
    while type(fn).__name__ in (
        "Independent",
        "ExpandedDistribution",
        "MaskedDistribution",
    ):
        fn = fn.base_dist
    return fn


def _improper_value(site: dict[str, Any]) -> Any:
    """Return a feasible value where a prior cannot be drawn from, to refuse it later."""
    if site["type"] != "sample" or site["is_observed"]:
        return None
    if not isinstance(base_distribution(site["fn"]), ImproperUniform):
        return None
    return site["fn"].support.feasible_like(jnp.zeros(site["fn"].shape()))


def lay_out(
    model: Callable[..., Any],
    trace: Trace,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Layout:
    """Lay the sites of a trace out in flat vectors."""
    params = {n: s["value"] for n, s in trace.items() if s["type"] == "param"}
    supports = {
        name: trace[name]["kwargs"].get("constraint", constraints.real) for name in params
    }
    latents = latent_sites(trace)
    init_params, unravel_params = ravel_pytree(unconstrain(params, supports))
    position, unravel_position = ravel_pytree(
        {name: _unconstrained(site) for name, site in latents.items()}
    )
    keep_arrays = _looks_at_values(model, args, kwargs)
    return Layout(
        model=model,
        call=split_call(args, kwargs, keep_arrays)[0],
        latents=tuple(latents),
        constraints=supports,
        init_params=_strong(init_params),
        is_free=_free_coordinates(unravel_params(init_params), supports),
        unravel_params=unravel_params,
        unravel_position=unravel_position,
        dim=position.size,
    )


def _looks_at_values(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether the model needs the values of its arrays and not only their shapes."""
    call, arrays = split_call(args, kwargs, keep_arrays=False)

    def run_abstractly(values: list[Array]) -> int:
        filled_args, filled_kwargs = call.fill(values)
        run_once(model, jax.random.key(0), filled_args, filled_kwargs)
        return 0

    try:
        jax.eval_shape(run_abstractly, arrays)
    except _NEEDS_VALUES:
        return True
    return False


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


def _is_factor(site: dict[str, Any]) -> bool:
    return isinstance(base_distribution(site["fn"]), Unit)


def _is_data(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"] and not _is_factor(site)


def observed_data(trace: Trace) -> dict[str, np.ndarray]:
    """Return the values of observed sites, factors left out."""
    return {n: np.asarray(site["value"]) for n, site in trace.items() if _is_data(site)}
