r"""Weigh the modes of a small posterior anew.

Annealing decides early how many particles go to each mode, Langevin moves never change it,
and a bridge to a Gaussian takes it for granted. Importance sampling does not: what counts is
that the proposals cover every mode. They are mixtures of Student t's
(:mod:`~numpyro_jala.engine.mixture`), fitted first to the particles of the other half of the
islands and then to its weighted draws (population Monte Carlo, Cappé et al. 2004). A tenth of
them comes from modes that a search found, from draws of the reference: a mode that the
particles lost on the way is seen again, if it can be found downhill.

Where proposals are rare a few draws would have most of the weight, or none would be there at
all. Particles are, if any of them has come that way. So the estimate is a bridge from the
particles to the mixtures, in which draws count for nearly all: where the ratio of target to
proposal is far above its mean the particles tell the mass, and elsewhere the draws. It is
importance sampling with weights truncated as Ionides (2008) does, less the bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import on_mesh, share, spread
from numpyro_jala.engine import linalg, mixture
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import estimation, evidence, programs
from numpyro_jala.inference.evidence import Bridge
from numpyro_jala.inference.programs import Data, Fixed
from numpyro_jala.inference.snapshots import Snapshot, put_together

#: Of the particles of half the islands. For three clusters whose labels may be exchanged four
#: of each island gave an error bar of 0.055, these 0.03, and twice as many no smaller one.
_CLUSTERS = 16
#: Searches for a mode, their steps, and most modes that are kept, a multiple of clusters. With
#: 24 steps a narrow mode in eight dimensions is not reached, with 128 starts in nine of ten runs.
_STARTS, _SEARCH_STEPS, _MODES = 128, 40, _CLUSTERS
#: Of the proposals come from these modes.
_SHARE = 0.1
#: Times that the proposals are fitted; the last draws count. Four times gave the same error
#: bars with modes of unlike width in two and four dimensions, and smaller ones (0.016 for
#: 0.023) in eight.
_ROUNDS = 2
#: Two estimates differ if they are further apart than so many standard errors and nats. An
#: error from eight islands has tails: four of them are exceeded once in two hundred times.
_FAR, _NEAR = 4.0, 0.01
#: Share of the draws' error that the bridge's may have, to be taken.
_CLEARLY = 0.5
#: Share of the posterior that draws should cover, to be taken: they become its sample.
_COVERED = 0.9


class Modes(NamedTuple):
    """Local minima of a potential, and factors of the inverse of its curvature there."""

    position: Array  # (modes, dim)
    factor: Array  # (modes, dim, dim), lower


class _Search(NamedTuple):
    """Where a quasi-Newton search is."""

    position: Array  # (dim,)
    value: Array  # ()
    gradient: Array  # (dim,)
    inverse: Array  # (dim, dim), of the curvature
    length: Array  # (), of the next step as a share of Newton's


def _search_step(
    value_and_grad: Callable[[Array], tuple[Array, Array]], here: _Search
) -> _Search:
    """Take a step of the BFGS method, or shorten the next one."""
    step = -here.inverse @ here.gradient
    # Not further than the reference is wide, so that a search stays in its valley.
    step = here.length * step / jnp.maximum(1.0, jnp.linalg.norm(step))
    position = here.position + step
    value, gradient = value_and_grad(position)
    gain = jnp.dot(here.gradient, step)
    accepted = (value <= here.value + 1e-4 * gain) & jnp.isfinite(gradient).all()
    change = gradient - here.gradient
    curvature = jnp.dot(change, step)
    useful = accepted & (curvature > 1e-12)
    scale = 1 / jnp.where(useful, curvature, 1.0)
    shift = jnp.eye(step.size) - scale * jnp.outer(step, change)
    inverse = shift @ here.inverse @ shift.T + scale * jnp.outer(step, step)
    return _Search(
        jnp.where(accepted, position, here.position),
        jnp.where(accepted, value, here.value),
        jnp.where(accepted, gradient, here.gradient),
        jnp.where(useful, inverse, here.inverse),
        jnp.where(accepted, 1.0, here.length / 4),
    )


def find(potential_fn: Callable[[Array], Array], starts: Array) -> Modes:
    """Find the modes downhill of some starts, the most massive first.

    Mass is that of a Gaussian with the mode's curvature. A mode within reach of a more
    massive one is left out; where there are few modes they are repeated in turn.
    """
    scale = jnp.maximum(jnp.std(starts, 0), 1e-20)
    value_and_grad = jax.value_and_grad(lambda z: potential_fn(z * scale))
    dim, dtype = starts.shape[1], starts.dtype

    def search(start: Array) -> _Search:
        first = _Search(
            start, *value_and_grad(start), jnp.eye(dim, dtype=dtype), jnp.ones((), dtype)
        )
        return lax.fori_loop(
            0, _SEARCH_STEPS, lambda _, here: _search_step(value_and_grad, here), first
        )

    found = jax.vmap(search)(starts / scale)
    factor = linalg.cholesky(found.inverse[None])[0]
    log_mass = jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(-1) - found.value
    usable = jnp.isfinite(log_mass) & jnp.isfinite(found.gradient).all(-1)

    def choose(left: Array, _: None) -> tuple[Array, Array]:
        best = jnp.argmax(jnp.where(left, log_mass, -jnp.inf))
        away = (found.position - found.position[best])[None, :, :, None]
        root = jnp.broadcast_to(factor[best], (1, *factor.shape))
        squares = jnp.sum(linalg.solve_lower(root, away)[0, :, :, 0] ** 2, -1)
        return left & (squares > dim + 4), jnp.where(left.any(), best, -1)

    _, chosen = lax.scan(choose, usable, length=_MODES)
    count = jnp.maximum(jnp.sum(chosen >= 0), 1)
    chosen = chosen[jnp.arange(_MODES) % count]
    return Modes(scale * found.position[chosen], scale[:, None] * factor[chosen])


class Weighed(NamedTuple):
    """Draws from the last proposals and their weights, and particles that bear witness.

    log_weight, log_ratio
        Logarithms of target to proposal, at draws and at particles.
    weight
        Of the particles, normalised within each island.
    """

    position: Array  # (num_islands, num_draws, dim)
    potential: Array  # (num_islands, num_draws)
    log_weight: Array  # (num_islands, num_draws)
    log_ratio: Array  # (num_islands, num_particles)
    weight: Array  # (num_islands, num_particles)


def num_evaluations(fixed: Fixed) -> int:
    """Return how often :func:`weigh` evaluates the model."""
    return _STARTS * _SEARCH_STEPS + _ROUNDS * estimation.num_for_draws(fixed)


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def weigh(
    fixed: Fixed,
    rng_key: PRNGKey,
    data: Data,
    params: Array,
    clouds: list[Snapshot],
    level: Array,
) -> Weighed:
    """Draw from proposals that cover the modes, and weigh the draws.

    Parameters
    ----------
    clouds
        Particles at these parameters.
    level
        What the weights take the potentials to be higher by than zero, (1,).
    """
    search_key, *round_keys = random.split(rng_key, 1 + _ROUNDS)
    starts = programs.draw_reference(search_key, fixed, data, params, (1, _STARTS))[0]
    starts = jnp.where(jnp.isfinite(starts), starts, 0.0)  # one of them would spoil all
    potential_fn = programs.potential_at(fixed, data, params)
    one = jnp.ones((1,), starts.dtype)
    modes = find(lambda x: potential_fn(params, one, x)[0], starts)
    cloud = put_together(clouds)
    shape = cloud.position.shape
    own, potential = cloud.weight[:, 0], cloud.potential[:, 0]
    particles = _halves(cloud.position)
    num_draws = particles.shape[0], particles.shape[1]

    def improve(last: Weighed, key: PRNGKey) -> tuple[Weighed, None]:
        weight = normalise(_halves(last.log_weight))
        clusters = mixture.fit(weight, _halves(last.position), _CLUSTERS)
        clusters = mixture.with_common(clusters, *modes, _SHARE)
        draws = mixture.loo_draw(key, clusters, num_draws)
        at_draws, at_particles = (
            mixture.loo_log_density(clusters, rows).reshape(shape[:2])
            for rows in (draws, particles)
        )
        position = spread(draws.reshape(shape))
        log_joint = estimation.log_joint_of_draws(
            fixed, data, params, cloud, position, level
        )
        log_ratio = level - potential - at_particles
        return Weighed(
            position, level - log_joint, log_joint - at_draws, log_ratio, own
        ), None

    first = Weighed(cloud.position, potential, jnp.log(own), jnp.zeros_like(own), own)
    found, _ = lax.scan(improve, first, jnp.stack(round_keys))
    return share(found)


def _halves(rows: Array) -> Array:
    """Put the islands of each half together; an odd number of islands stay as they are."""
    num_groups = len(rows) if len(rows) % 2 else 2
    return rows.reshape(num_groups, -1, *rows.shape[2:])


def estimate(weighed: Weighed) -> Bridge:
    """Estimate the evidence by draws, and by particles where draws are rare, less the level.

    Draws are independent and particles are not, so that these get a small share. With
    ``n`` draws it is ``1 / sqrt(n)``: no draw counts more than ``sqrt(n)`` of the mean.
    """
    log_weight = weighed.log_weight
    few = log_weight.size**-0.5
    return evidence.bridge(weighed.weight, weighed.log_ratio, log_weight, share=few)


class Choice(NamedTuple):
    """Whether two estimates agree, and which is the better."""

    agrees: Array  # ()
    takes_draws: Array  # ()


def choose(bridge: Bridge, drawn: Bridge, level: Array) -> Choice:
    """Choose between a bridge from the particles and importance sampling.

    The bridge if it is clearly the more precise. If they differ the particles are in the
    wrong places, and the draws are right if they cover what the particles have found.

    Parameters
    ----------
    level
        About the potential: what rounds it off is no difference.
    """
    rounding = np.finfo(jnp.result_type(level)).eps * jnp.abs(level)
    noise = jnp.hypot(bridge.standard_error, drawn.standard_error)
    gap = jnp.abs(jnp.asarray(bridge.log_evidence) - drawn.log_evidence)
    agrees = gap <= _FAR * noise + _NEAR + rounding
    # The bridge's error is from few islands: the lower of two would often be too low.
    is_clear = bridge.standard_error < _CLEARLY * drawn.standard_error
    is_better = ~(agrees & is_clear)
    return Choice(agrees, is_better & (drawn.overlap > _COVERED))
