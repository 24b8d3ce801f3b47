"""Where annealing starts: a distribution of known mass that can be drawn from."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import random
from jax.scipy.linalg import solve_triangular
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoContinuous, AutoNormal

from numpyro_jala._typing import Array, Potential, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.engine import laplace
from numpyro_jala.engine.langevin import draw_noise
from numpyro_jala.inference import options
from numpyro_jala.model.density import Layout

_GUIDE_STEPS = 2_000
_GUIDE_RATE = 0.01


class Gaussian(NamedTuple):
    """A normal distribution; its factor is a lower triangle or a diagonal."""

    mean: Array  # (dim,)
    factor: Array  # (dim, dim) or (dim,)


def from_noise(gaussian: Gaussian, noise: Array) -> Array:
    """Map standard normal rows to draws."""
    mean, factor = gaussian
    return mean + (noise @ factor.T if factor.ndim == 2 else noise * factor)


def log_density(gaussian: Gaussian, position: Array) -> Array:
    """Return the log-density of rows."""
    mean, factor = gaussian
    centred = position - mean
    if factor.ndim == 2:
        noise = solve_triangular(factor, centred.T, lower=True).T
        diagonal = jnp.diagonal(factor)
    else:
        noise, diagonal = centred / factor, factor
    log_norm = jnp.sum(jnp.log(diagonal)) + 0.5 * mean.size * jnp.log(2 * jnp.pi)
    return -0.5 * jnp.sum(noise**2, -1) - log_norm


class Reference(NamedTuple):
    """Where annealing starts: from the prior, unless one of these is there.

    gaussian
        A distribution of the unconstrained latents.
    mode
        Of the posterior: particles live in the coordinates of a Laplace approximation.
    """

    gaussian: Gaussian | None
    mode: Array | None
    num_evaluations: int


PRIOR = Reference(None, None, 0)


def from_gaussian(potential_fn: Potential, gaussian: Gaussian) -> Potential:
    """Return the potential that goes from a Gaussian to the joint density."""

    def potential(params: Array, temperature: Array, position: Array) -> Array:
        joint = potential_fn(params, jnp.ones_like(temperature), position)
        reference = -log_density(gaussian, position[None])
        return (1 - temperature) * reference + temperature * joint

    return potential


def draw(
    rng_key: PRNGKey,
    layout: Layout,
    params: Array,
    arrays: list[Array],
    gaussian: Gaussian | None,
    shape: tuple[int, int],
) -> Array:
    """Draw positions (*shape, dim) from the reference."""
    if gaussian is not None:
        noise = draw_noise(rng_key, (*shape, layout.dim), gaussian.mean.dtype)
        return from_noise(gaussian, noise)
    keys = random.split(rng_key, math.prod(shape))
    draws = jax.vmap(lambda key: layout.draw_prior(key, params, arrays))(keys)
    return draws.reshape(*shape, layout.dim)


def make(
    reference: Any,
    rng_key: PRNGKey,
    layout: Layout,
    params: Array,
    arrays: list[Array],
) -> Reference:
    """Turn what the user named into a reference at the given parameters."""
    if isinstance(reference, str) and reference == "prior":
        return PRIOR
    if isinstance(reference, str) and reference in ("auto", "laplace"):
        return _from_mode(reference, layout, params, arrays)
    guide, guide_params = reference if isinstance(reference, tuple) else (reference, None)
    if not isinstance(guide, AutoContinuous | AutoNormal):
        raise ValueError(
            f"reference={reference!r} is neither 'prior', 'laplace', a Gaussian autoguide "
            "of numpyro.infer.autoguide nor a pair of one and its fitted params."
        )
    options.check_can_guide(layout)
    evaluations = 0
    if guide_params is None:
        guide_params = _fit(guide, rng_key, layout, params, arrays)
        evaluations = _GUIDE_STEPS
    gaussian = _gaussian_of(guide, guide_params, layout)
    return Reference(_widen(gaussian), None, evaluations)


def _widen(gaussian: Gaussian) -> Gaussian:
    scale = float(laplace.reference_scale(np.asarray(gaussian.mean.size)))
    return Gaussian(gaussian.mean, scale * gaussian.factor)


def _fit(
    guide: Any, rng_key: PRNGKey, layout: Layout, params: Array, arrays: list[Array]
) -> dict[str, Array]:
    args, kwargs = layout.call.fill(arrays)
    svi = SVI(layout.at(params), guide, optax.adam(_GUIDE_RATE), Trace_ELBO())
    result = svi.run(rng_key, _GUIDE_STEPS, *args, progress_bar=False, **kwargs)
    return dict(result.params)


def _gaussian_of(guide: Any, guide_params: dict[str, Array], layout: Layout) -> Gaussian:
    """Read the mean and the factor of a guide that is Gaussian once unconstrained."""
    if isinstance(guide, AutoNormal):
        prefix = guide.prefix
        # The flat vector holds the sites in the order of their names.
        names = sorted(layout.latents)
        loc = [jnp.ravel(guide_params[f"{name}_{prefix}_loc"]) for name in names]
        scale = [jnp.ravel(guide_params[f"{name}_{prefix}_scale"]) for name in names]
        return Gaussian(jnp.concatenate(loc), jnp.concatenate(scale))
    posterior = guide.get_posterior(guide_params)
    if hasattr(posterior, "scale_tril"):
        return Gaussian(posterior.loc, posterior.scale_tril)
    if hasattr(posterior, "covariance_matrix"):
        return Gaussian(posterior.loc, jnp.linalg.cholesky(posterior.covariance_matrix))
    if hasattr(posterior, "base_dist") and hasattr(posterior.base_dist, "scale"):
        return Gaussian(posterior.base_dist.loc, posterior.base_dist.scale)
    if type(posterior).__name__ == "Normal":
        return Gaussian(posterior.loc, posterior.scale)
    raise ValueError(
        f"The guide {type(guide).__name__} is not Gaussian, and a reference must be drawn "
        "from and its density known in closed form here. Use AutoLaplaceApproximation, "
        "AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal."
    )


# -- the coordinates of a Laplace approximation ------------------------------------------


def _from_mode(name: str, layout: Layout, params: Array, arrays: list[Array]) -> Reference:
    """Find the mode, where the coordinates of a Laplace approximation have their centre."""
    if layout.pattern is None:
        return PRIOR
    mode, is_convex = _find_mode(layout, params, arrays, name == "auto")
    if bool(mode.arrived) and (name == "laplace" or bool(is_convex)):
        evaluations = int(mode.num_steps) * (layout.pattern.cost + 2)
        return Reference(None, mode.position, evaluations)
    if name == "auto":
        return PRIOR
    found = np.array2string(np.asarray(mode.position), precision=3, threshold=8)
    raise ValueError(
        "reference='laplace' found no mode: the log-density has no finite, negative "
        f"second derivative where the search ended, at unconstrained latents {found}. "
        "Use reference='prior', or check the data."
    )


@compilation.program(static_argnums=(0, 3))
def _find_mode(
    layout: Layout, params: Array, arrays: list[Array], if_convex: bool
) -> tuple[laplace.Mode, Array]:
    assert layout.pattern is not None
    start = jnp.zeros((layout.dim,), layout.anchor.dtype)
    energy = partial(layout.energy(arrays), params)
    mode = laplace.find_mode(energy, layout.pattern, start, if_convex)
    return mode, laplace.is_convex(energy, layout.pattern, mode)
