"""From a NumPyro model and its data to potentials, reference draws and transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import compute_log_probs, log_density
from numpyro.primitives import Messenger

from numpyro_jala._typing import Array, Potential, PRNGKey, Tree
from numpyro_jala.backend.side_by_side import side_by_side
from numpyro_jala.engine.arrow import Arrow
from numpyro_jala.engine.partition import Partition, joint
from numpyro_jala.engine.sparsity import Pattern
from numpyro_jala.model import marginal
from numpyro_jala.model.arguments import Call
from numpyro_jala.model.components import Components, Index, TermFn, Terms, energy_terms
from numpyro_jala.model.parametrisation import coordinates, place
from numpyro_jala.model.sites import (
    Site,
    Trace,
    is_data,
    is_factor,
    num_masked,
    without_mask,
)
from numpyro_jala.model.supports import flatten, from_support, to_support


class Temper(Messenger):  # type: ignore[misc]
    """Raise everything in the joint density but the prior to the power ``temperature``.

    The prior is what ancestral sampling draws: latent sites and the Jacobians of their
    transforms, which are added as factors. An imputed latent has its density where it is
    observed, and is drawn from what its mask hides: that goes as the data come.
    """

    def __init__(
        self, temperature: Array, latents: tuple[str, ...], imputed: tuple[str, ...]
    ) -> None:
        super().__init__(None)
        self.temperature = temperature
        self.jacobians = {f"_{name}_log_det" for name in latents}
        self.imputed = imputed
        # A mask around a site takes them away as well.
        self.bare_jacobians = {f"_{name}_log_det" for name in imputed}

    def process_message(self, msg: Site) -> None:
        """Multiply the scale of observed sites and factors."""
        if msg["type"] != "sample":
            return
        if msg["name"] in self.imputed:
            msg["fn"], msg["scale"] = without_mask(msg["fn"]), 1 - self.temperature
        if msg["name"] in self.bare_jacobians:
            msg["fn"] = without_mask(msg["fn"])
        if marginal.is_tempered(msg, self.jacobians):
            scale = msg.get("scale")
            msg["scale"] = self.temperature if scale is None else scale * self.temperature


class Unobserve(Messenger):  # type: ignore[misc]
    """Draw the observed sites anew."""

    def process_message(self, msg: Site) -> None:
        """Forget what was observed."""
        if msg["type"] == "sample" and msg["is_observed"] and not is_factor(msg):
            msg["is_observed"], msg["value"] = False, None


@dataclass(frozen=True, eq=False)
class Layout:
    """The sites of a model, and how they lie in flat vectors.

    Compared by identity: compiled functions take it as a fixed argument, and the data
    apart from it.

    held
        Integer params, which stay as they are.
    anchor, moving
        Unconstrained values of all latents, and which of them move: a mask may leave
        some without a density. None if all do.
    scaled
        Latents whose coordinates are in units of their prior.
    held_log_det
        Log-Jacobian of the latents that do not move, which is no part of any density.
    imputed
        Latents masked as such, whose density is that of an observed site they fill.
    discrete
        Discrete latents, which are summed out.
    enum_dim
        The first axis free for them, from the right.
    draws_discrete
        Whether they can be drawn given the rest: NumPyro cannot in a model with a scan.
    is_noisy
        Whether the model asks for random numbers beside its sites.
    precision
        Of the model's matrix products, in JAX's words.
    rough_gradient
        Whether gradients do with the device's own precision.
    width
        Bytes of the largest array that the log-density makes of one particle, zero if it
        has a loop.
    components
        The independent components of the latents, None if there is but one.
    pattern
        Where the second derivative of the potential may have entries, if that is needed.
    """

    model: Callable[..., Any]
    call: Call
    latents: tuple[str, ...]
    constraints: dict[str, Any]
    held: dict[str, Tree]
    init_params: Array  # (num_params,), unconstrained
    is_free: np.ndarray  # (num_params,), unconstrained in truth
    unravel_params: Callable[[Array], dict[str, Tree]]
    unravel_latents: Callable[[Array], dict[str, Array]]
    anchor: Array  # (dim or more,)
    moving: np.ndarray | None  # (dim,)
    held_log_det: float
    imputed: tuple[str, ...]
    discrete: tuple[str, ...]
    enum_dim: int
    draws_discrete: bool
    is_noisy: bool
    precision: str
    rough_gradient: bool
    width: int
    components: Components | None
    scaled: tuple[str, ...] = ()
    pattern: Pattern | None = None

    @cached_property
    def partition(self) -> Partition:
        """Which latents belong to which component."""
        return joint(self.dim) if self.components is None else self.components.partition

    def splits_as(self, components: Components | None) -> bool:
        """Tell whether the latents fall into the same components as those given."""
        if self.components is None or components is None:
            return self.components is components
        return self.components.equals(components)

    @property
    def dim(self) -> int:
        """How many unconstrained latents move."""
        return self.anchor.size if self.moving is None else self.moving.size

    @cached_property
    def in_double(self) -> Layout:
        """The same in double precision, made and used where JAX has that."""
        init_params, unravel_params = flatten(self.unravel_params(self.init_params))
        anchor, unravel_latents = flatten(self.unravel_latents(self.anchor))
        return replace(
            self,
            init_params=init_params,
            unravel_params=unravel_params,
            anchor=anchor,
            unravel_latents=unravel_latents,
        )

    # -- params ------------------------------------------------------------------------

    def constrain_params(self, params: Array) -> dict[str, Tree]:
        """Map a flat unconstrained vector to values of the param sites."""
        return to_support(self.unravel_params(params), self.constraints)

    def unconstrain_params(self, values: dict[str, Tree]) -> Array:
        """Map values of the param sites to a flat unconstrained vector."""
        flat = ravel_pytree(from_support(values, self.constraints))[0]
        return jnp.asarray(flat, self.init_params.dtype)

    def at(self, params: Array) -> Callable[..., Any]:
        """Return the model with its params fixed."""
        return handlers.substitute(
            self.model, data={**self.held, **self.constrain_params(params)}
        )

    # -- latents -----------------------------------------------------------------------

    def unravel_position(self, position: Array) -> dict[str, Array]:
        """Map a position to the coordinates of the latent sites."""
        if self.moving is not None:
            position = self.anchor.at[self.moving].set(position)
        return self.unravel_latents(position)

    def _ravel_sites(self, sites: Trace) -> Array:
        free = {name: coordinates(sites[name], self.scaled) for name in self.latents}
        flat = jnp.asarray(ravel_pytree(free)[0], self.anchor.dtype)
        return flat if self.moving is None else flat[self.moving]

    def columns(self) -> dict[str, np.ndarray]:
        """Return the coordinates of a position that belong to each latent site."""
        # A flat vector holds the sites in the order of their names.
        names = sorted(self.latents)
        shapes = self.unravel_latents(self.anchor)
        owner = np.repeat(np.arange(len(names)), [np.size(shapes[name]) for name in names])
        owner = owner if self.moving is None else owner[self.moving]
        return {name: np.flatnonzero(owner == i) for i, name in enumerate(names)}

    def natural_order(self) -> np.ndarray:
        """Return the coordinates of each component in turn, along the sites' first axes.

        Those of several series in one component come side by side.
        """
        places = np.zeros(self.dim)
        for columns in self.columns().values():
            places[columns] = np.arange(columns.size) / columns.size
        return np.lexsort((places, self.partition.owner))

    def label(self, coordinate: int) -> str:
        """Return the name of a coordinate of a position, as in ``u[3]``."""
        return self.labels([coordinate])[0]

    def labels(self, coordinates: Sequence[int] | np.ndarray) -> list[str]:
        """Return the names of coordinates of a position."""
        values = self.unravel_latents(self.anchor)
        shapes = {name: np.shape(values[name]) for name in sorted(self.latents)}

        def name_one(coordinate: int) -> str:
            place = coordinate if self.moving is None else int(self.moving[coordinate])
            for name, shape in shapes.items():
                if place < math.prod(shape):
                    index = ",".join(map(str, np.unravel_index(place, shape)))
                    return f"{name}[{index}]" if shape else name
                place -= math.prod(shape)
            raise IndexError(coordinate)

        return [name_one(int(coordinate)) for coordinate in coordinates]

    def describe_components(self) -> dict[str, Any]:
        """Return how many components there are, how large, and that of each latent.

        Latents without a density belong to none: -1.
        """
        parts = self.partition
        owner = np.full(self.anchor.size, -1)
        owner[slice(None) if self.moving is None else self.moving] = parts.owner
        values = self.unravel_latents(jnp.asarray(owner, self.anchor.dtype))
        return {
            "num_components": parts.num_components,
            "sizes": parts.sizes,
            **{name: np.asarray(value, int) for name, value in values.items()},
        }

    # -- what the model says -----------------------------------------------------------

    def _at_position(self, params: Array, position: Array) -> Callable[..., Any]:
        """Return the model with params and latents fixed, and discrete ones summed out.

        It has factors for the latents' transforms.
        """
        model = self.at(params)
        if self.is_noisy:
            model = handlers.seed(model, jax.random.key(0))
        if self.discrete:
            model = marginal.sum_out(model, self.enum_dim)
        value_fn = partial(place, self.unravel_position(position), self.scaled)
        return handlers.substitute(model, substitute_fn=value_fn)

    def joint(self, arrays: list[Array]) -> Callable[[Array, Array, Array], Array]:
        """Return the potential of all latents, from the prior to the joint density."""
        args, kwargs = self.call.fill(arrays)

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            model = self._at_position(params, position)
            exact = jax.default_matmul_precision(self.precision)
            with exact, Temper(temperature, self.latents, self.imputed):
                if self.discrete:
                    found = marginal.log_density(model, args, kwargs)
                else:
                    found = log_density(model, args, kwargs, {})[0]
            return self.held_log_det - found

        return side_by_side(potential)

    def terms(self, arrays: list[Array]) -> TermFn:
        """Return the function that gives the terms of the joint density."""
        args, kwargs = self.call.fill(arrays)
        jacobians = {f"_{name}_log_det" for name in self.latents}
        terms_of = _marginal_terms if self.discrete else _terms
        held = [-jnp.asarray(self.held_log_det)] if self.held_log_det else []

        def terms(params: Array, position: Array) -> Terms:
            model = self._at_position(params, position)
            with jax.default_matmul_precision(self.precision):
                found = terms_of(partial(model, *args, **kwargs), jacobians)
            return Terms([*found.prior, *held], found.data)

        return side_by_side(terms)

    def energy(self, arrays: list[Array]) -> Callable[[Array, Array], Array]:
        """Return the terms of the potential, or their sum if no pattern asks for each."""
        if isinstance(self.pattern, Arrow):
            return energy_terms(self.terms(arrays))
        joint = self.joint(arrays)
        return lambda params, x: joint(params, jnp.ones((), x.dtype), x)

    def index(self) -> Index | None:
        """Return where the terms of several components are."""
        if self.components is None:
            return None
        index: Index = jax.tree.map(jnp.asarray, self.components.index)
        return index

    def potential(self, arrays: list[Array], index: Index | None = None) -> Potential:
        """Return the potentials of the components; ``index`` is that of this object."""
        if self.components is not None:
            return self.components.potential(self.terms(arrays), index)
        whole = self.joint(arrays)

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            return whole(params, temperature[0], position)[None]

        return potential

    def trace(self, rng_key: PRNGKey, params: Array, arrays: list[Array]) -> Trace:
        """Run the model once at the given parameters, latents drawn from the prior."""
        args, kwargs = self.call.fill(arrays)
        seeded = handlers.seed(self.at(params), rng_key)
        return dict(handlers.trace(seeded).get_trace(*args, **kwargs))

    def draw_prior(self, rng_key: PRNGKey, params: Array, arrays: list[Array]) -> Array:
        """Draw one unconstrained position from the prior at the given parameters."""
        return self._ravel_sites(self.trace(rng_key, params, arrays))

    def log_prior_mass(self, params: Array, arrays: list[Array]) -> Array:
        """Return the logarithm of what the density of the prior sums up to.

        Zero, unless discrete latents are masked: then each of their values counts one.
        """
        mass = jnp.zeros((), self.anchor.dtype)
        if not self.discrete:
            return mass
        sites = self.trace(jax.random.key(0), params, arrays)
        for site in (sites[name] for name in self.discrete):
            num_values = len(site["fn"].enumerate_support(expand=False))
            mass += num_masked(site) * jnp.log(jnp.asarray(num_values, mass.dtype))
        return mass

    def _replay(
        self,
        rng_key: PRNGKey,
        params: Array,
        position: Array,
        arrays: list[Array],
        known: dict[str, Array],
        inner_fn: Callable[..., Any] = lambda model: model,
    ) -> Trace:
        """Run the model at one position; a support may depend on params or latents.

        Discrete latents that are not among the ``known`` are drawn given the rest.
        """
        args, kwargs = self.call.fill(arrays)
        free = self.unravel_position(position)

        def value_of(site: Site) -> Any:
            drawn = place(free, self.scaled, site, counts=False)
            return known.get(site["name"]) if drawn is None else drawn

        # What un-observes a site must stand within what seeds it.
        inner = inner_fn(self.at(params))
        replayed = handlers.substitute(inner, substitute_fn=value_of)
        draw_key, rest_key = jax.random.split(rng_key)
        if self.draws_discrete and not known:
            replayed = marginal.draw_discrete(replayed, self.enum_dim, draw_key)
        seeded = handlers.seed(replayed, rest_key)
        return dict(handlers.trace(seeded).get_trace(*args, **kwargs))

    def constrain(
        self, rng_key: PRNGKey, params: Array, position: Array, arrays: list[Array]
    ) -> dict[str, Array]:
        """Map one position to the values of latent and deterministic sites.

        Discrete latents are drawn given the rest. Where they cannot be, they are left
        out, and with them the deterministic sites, which may depend on them.
        """
        sites = self._replay(rng_key, params, position, arrays, {})
        shown = set(self.latents)
        if self.draws_discrete or not self.discrete:
            shown |= set(self.discrete)
            shown |= {n for n, site in sites.items() if site["type"] == "deterministic"}
        return {name: site["value"] for name, site in sites.items() if name in shown}

    def predict(
        self, rng_key: PRNGKey, params: Array, position: Array, arrays: list[Array]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Draw the observed sites at one position, and weigh what was observed there."""
        seen_key, new_key = jax.random.split(rng_key)
        sites = self._replay(seen_key, params, position, arrays, {})
        seen = {name: site for name, site in sites.items() if is_data(site)}
        log_likelihood = {n: site["fn"].log_prob(site["value"]) for n, site in seen.items()}
        known = {name: sites[name]["value"] for name in self.discrete}
        drawn = self._replay(new_key, params, position, arrays, known, Unobserve)
        return {name: drawn[name]["value"] for name in seen}, log_likelihood

    def unconstrain(
        self, params: Array, values: dict[str, Array], arrays: list[Array]
    ) -> Array:
        """Map constrained latents of one particle to a position."""
        args, kwargs = self.call.fill(arrays)
        fixed = handlers.substitute(self.at(params), data=values)
        seeded = handlers.seed(fixed, jax.random.key(0))
        return self._ravel_sites(handlers.trace(seeded).get_trace(*args, **kwargs))


def _terms(model: Callable[[], Any], jacobians: set[str]) -> Terms:
    """Return the log-probabilities of all sites, none of which is summed out."""
    found, sites = compute_log_probs(model, (), {}, {}, False)
    tempered = {name for name in found if marginal.is_tempered(sites[name], jacobians)}
    return Terms(
        [value for name, value in found.items() if name not in tempered],
        [value for name, value in found.items() if name in tempered],
    )


def _marginal_terms(model: Callable[[], Any], jacobians: set[str]) -> Terms:
    """Return the terms where discrete latents are summed out of prior and joint density.

    In between goes a power of their ratio. The terms of the prior come first in both lists,
    so that what depends on no latent is counted with the same component in both.
    """
    joint = marginal.terms(model)
    prior = marginal.terms(marginal.prior_of(model, jacobians))
    return Terms(prior, [*(-each for each in prior), *joint])
