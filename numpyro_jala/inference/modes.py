r"""Weigh the modes of a small posterior anew.

Annealing decides early how many particles go to each mode, Langevin moves never change it,
and a bridge takes it for granted. Importance sampling does not: what counts is that the
proposals cover every mode. They are mixtures of Student t's
(:mod:`~numpyro_jala.engine.mixture`), fitted first to the particles of the other islands and
then, a few times, to the weighted draws of the other islands (population Monte Carlo, Cappé
et al. 2004). A tenth of them comes from modes that a search found, from draws of the
reference: a mode that the particles lost on the way is seen again, if it can be found
downhill.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import on_mesh, share
from numpyro_jala.engine import linalg, mixture
from numpyro_jala.engine.mixture import CLUSTERS
from numpyro_jala.engine.weights import log_mean_exp, normalise
from numpyro_jala.inference import estimation, programs
from numpyro_jala.inference.evidence import Bridge
from numpyro_jala.inference.programs import CLOUDS, Data, Fixed
from numpyro_jala.inference.snapshots import Snapshot, put_together

#: Searches for a mode, their steps, and most modes that are kept.
_STARTS, _SEARCH_STEPS, _MODES = 128, 40, 2 * CLUSTERS
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
#: Effective share of the draws below which they are not to be trusted.
_FEWEST = 0.02


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
    massive one is left out; where there are few modes the last are copies of the first.
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
    chosen = jnp.where(chosen < 0, chosen[0], chosen)
    return Modes(scale * found.position[chosen], scale[:, None] * factor[chosen])


class Weighed(NamedTuple):
    """Draws from the last proposals, and their weights.

    log_mean_seen
        Logarithm of the mean weight that the particles would have: under the posterior,
        where a draw has the weight :math:`w`, its mean is :math:`E[w^2] / E[w]`. Draws that
        miss a part of the posterior do not see how unequal their weights are.
    """

    position: Array  # (num_islands, num_draws, dim)
    potential: Array  # (num_islands, num_draws)
    log_weight: Array  # (num_islands, num_draws), log-ratio of target to proposal
    log_mean_seen: Array  # ()


def num_evaluations(fixed: Fixed) -> int:
    """Return how often :func:`weigh` evaluates the model."""
    settings = fixed.settings
    num_draws = CLOUDS * settings.num_islands * settings.num_particles
    return _STARTS * _SEARCH_STEPS + _ROUNDS * num_draws


@partial(jax.jit, static_argnums=0)
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
    num_islands, num_draws, _ = cloud.position.shape

    def improve(last: Weighed, key: PRNGKey) -> tuple[Weighed, None]:
        clusters = mixture.fit(normalise(last.log_weight), last.position)
        clusters = mixture.with_common(clusters, *modes, _SHARE)
        draws = mixture.loo_draw(key, clusters, (num_islands, num_draws))
        potential = estimation.evaluate_draws(fixed, data, params, draws)[:, 0]
        log_weight = level - potential - mixture.loo_log_density(clusters, draws)
        density = mixture.loo_log_density(clusters, cloud.position)
        seen = logsumexp(level - cloud.potential[:, 0] - density, b=own / num_islands)
        return Weighed(draws, potential, log_weight, seen), None

    own = cloud.weight[:, 0]
    nothing = jnp.zeros((), own.dtype)
    first = Weighed(cloud.position, cloud.potential[:, 0], jnp.log(own), nothing)
    found, _ = lax.scan(improve, first, jnp.stack(round_keys))
    return share(found)


def estimate(weighed: Weighed) -> Bridge:
    """Estimate the evidence by the weights of draws, less the level.

    Draws are independent, and all of them tell the error; islands are few. So do the
    particles, which may be where no draw is.
    """
    log_weight = weighed.log_weight
    pooled = log_mean_exp(log_weight.ravel())
    log_mean = log_mean_exp(2 * log_weight.ravel()) - pooled
    share = jnp.exp(pooled - jnp.maximum(log_mean, weighed.log_mean_seen))
    error = jnp.sqrt((1 / share - 1) / log_weight.size)
    return Bridge(pooled, error, share, log_mean_exp(log_weight))


class Choice(NamedTuple):
    """Whether two estimates agree, and which is the better."""

    agrees: Array  # ()
    takes_draws: Array  # ()


def choose(bridge: Bridge, drawn: Bridge, level: Array) -> Choice:
    """Choose between a bridge from the particles and importance sampling.

    The bridge if it is clearly the more precise. If they differ the particles are in the
    wrong places, and the draws are right if their weights are not too unequal.

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
    return Choice(agrees, is_better & (drawn.overlap > _FEWEST))
