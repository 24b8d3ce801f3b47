"""What a run ends with: the estimate, the log-evidence and the information there."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import em, mixture
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.state import REST, State
from numpyro_jala.inference import (
    estimation,
    evidence,
    importance,
    information,
    modes,
    pareto,
    programs,
)
from numpyro_jala.inference.estimation import Draws, Score
from numpyro_jala.inference.evidence import Bridge, Compared
from numpyro_jala.inference.information import Information, Moments
from numpyro_jala.inference.loop import run_steps
from numpyro_jala.inference.modes import Weighed
from numpyro_jala.inference.programs import APART, CLOUDS, SETTLE
from numpyro_jala.inference.record import HeavyTail, Run

#: The score of the marginal likelihood takes this share of the evidence's draws.
_SCORE_SHARE = 4
#: Length of a difference, in standard errors if the latents were known: so far the draws
#: serve nearly as well as where they were fitted, and rounding is a thousandth.
_DIFFERENCE = 0.5
#: The same for particles that follow the parameters, in standard errors of the estimate: the
#: likelihood of a weakly determined parameter is a quadratic over a short way only.
_SHORT_DIFFERENCE = 0.1
#: Effective share of a component's draws below which the tail of its weights is looked at.
_UNEQUAL = 0.2
#: Most numbers of importance draws that particles are taken from.
_MOST_REDRAWN = 2**24
#: Most times that the maximum is sought with new draws.
_ROUNDS = 6
_NEWTON_STEPS, _HALVINGS = 8, 6
#: Most times that differences are taken, each with lengths that the last one found.
_DIFFERENCES = 3
#: Share of their effective size that draws may keep where they serve other params.
_COVERS = 0.3
#: Nats to the maximum that are as good as none: a fiftieth of a standard error.
_ENOUGH = 2e-4
#: Particles times components from which the information is precise.
_PRECISE = 100_000


def conclude(run: Run, state: State) -> None:
    """Rest at the estimate, and find the log-evidence and the information there."""
    params = programs.best_params(run.fixed, state)
    recursive = programs.log_evidence(state)
    if run.fixed.settings.num_islands == 1:
        found = _inform(run, params, [state.cloud]) if run.informs else None
        run.store_result(state, params, evidence.unknown(1), recursive, found, None)
        return
    rng_key, draw_key = random.split(random.fold_in(state.rng_key, 1))
    state = state._replace(rng_key=rng_key)
    state = run_steps(run, state, REST, SETTLE, params, SETTLE if params.size else 0)
    is_joint = run.fixed.layout.partition.is_joint
    end = (_conclude_joint if is_joint else _conclude_apart)(run, state, params, draw_key)
    run.store_result(*end[:3], recursive, *end[3:])


def _ascended(run: Run, state: State) -> bool:
    """Tell whether the parameters are to be maximised, and few."""
    return run.fixed.settings.newton and int(state.num_steps) > 0 and run.informs


def _rest(run: Run, state: State, params: Array) -> tuple[State, list[Cloud]]:
    """Keep some clouds at the parameters, a few moves apart."""
    clouds = []
    for _ in range(CLOUDS):
        state = run_steps(run, state, REST, APART, params)
        clouds.append(state.cloud)
    return state, clouds


# -- one component ---------------------------------------------------------------------


def _conclude_joint(
    run: Run, state: State, params: Array, rng_key: PRNGKey
) -> tuple[State, Array, Bridge, Information | None, Compared | None]:
    if _ascended(run, state):
        improve = _polish if run.data.mode is None else _climb
        params, state = improve(run, state, params)
    state, clouds = _rest(run, state, params)
    gaussian, level = run.programs.ready(estimation.fit_loo)(run.fixed, clouds)
    bridge_key, draw_key = random.split(rng_key)
    bridge = _bridge(run, bridge_key, params, clouds, gaussian, level)
    if run.data.mode is not None:
        # What particles say of very many latents is noise where Laplace is nearly right.
        plain = evidence.standard(gaussian)
        key = random.fold_in(bridge_key, 1)
        other = _bridge(run, key, params, clouds, plain, level)
        bridge = min(
            bridge, other, key=lambda each: np.nan_to_num(each.standard_error, nan=np.inf)
        )
    compared = None
    if mixture.serves(run.fixed.layout.partition):
        weighed = run.programs.ready(modes.weigh)(
            run.fixed, draw_key, run.placed, params, clouds, level
        )
        run.num_evaluations += modes.num_evaluations(run.fixed)
        drawn = evidence.at_level(modes.estimate(weighed), level[0])
        agrees, takes_draws = modes.choose(bridge, drawn)
        compared = Compared(bridge, drawn, bool(agrees), _tail_shape(weighed))
        if bool(takes_draws):
            bridge, clouds = drawn, _as_clouds(weighed, clouds)
            state = state._replace(cloud=_redrawn(state, weighed))
    found = None
    if run.informs and run.data.mode is not None:
        found = _inform_by_differences(run, state, params, clouds[0])
    elif run.informs:
        found = _inform(run, params, clouds)
    return state, params, bridge, found, compared


def _bridge(
    run: Run,
    rng_key: PRNGKey,
    params: Array,
    clouds: list[Cloud],
    gaussian: evidence.Gaussian,
    level: Array,
) -> Bridge:
    """Estimate the evidence by a bridge to Gaussians."""
    run.num_evaluations += CLOUDS * clouds[0].log_weight.size
    program = run.programs.ready(estimation.bridge_to)
    found = program(run.fixed, rng_key, run.placed, params, clouds, gaussian, level)
    return evidence.at_level(fetch(found), level[0])


def _tail_shape(weighed: Weighed) -> float:
    return pareto.shape(fetch(weighed.log_weight).ravel())


def _as_clouds(weighed: Weighed, clouds: list[Cloud]) -> list[Cloud]:
    """Return weighted draws as so many clouds."""
    parts = zip(
        jnp.split(weighed.position, len(clouds), 1),
        jnp.split(weighed.log_weight[:, None], len(clouds), 2),
        strict=True,
    )
    return [clouds[0]._replace(position=x, log_weight=w) for x, w in parts]


def _redrawn(state: State, weighed: Weighed) -> Cloud:
    """Replace the particles by draws."""
    key = random.fold_in(state.rng_key, 5)
    drawn = modes.draw_cloud(key, state.cloud.position.shape[1], weighed)
    return state.cloud._replace(
        position=drawn.position,
        log_weight=drawn.log_weight[:, None],
        potential=drawn.potential[:, None],
    )


def _polish(run: Run, state: State, params: Array) -> tuple[Array, State]:
    """Take a Newton step on what the particles at rest know, and rest there."""
    found = _inform(run, params, [state.cloud])
    uncertainty = information.invert(found, run.fixed.layout.is_free)
    step = jnp.asarray(information.newton_step(found, uncertainty), params.dtype)
    if not bool(em.is_near(state.optim_state, step, SETTLE // 2, 1)):
        return params, state
    better = params + step
    return better, run_steps(run, state, REST, SETTLE, better, SETTLE)


# -- one component in the coordinates of a Laplace approximation -------------------------


def _climb(run: Run, state: State, params: Array) -> tuple[Array, State]:
    """Climb to the maximum on particles, which follow the parameters."""
    for index in range(_ROUNDS):
        state = run_steps(run, state, REST, APART, params)
        score_at = partial(_score_of, run, state.cloud)
        if index == 0:
            found = _inform_by_differences(run, state, params, state.cloud)
            known = information.invert(found, run.fixed.layout.is_free)
            covariance = np.nan_to_num(known.covariance)
        better, _ = _maximise(score_at, params, covariance, index > 0)
        if better is params:
            break
        params = better
        state = run_steps(run, state, REST, SETTLE, params, SETTLE)
    return params, state


def _inform_by_differences(
    run: Run, state: State, params: Array, cloud: Cloud
) -> Information:
    """Find score and information on particles, which follow the parameters."""
    score_at = partial(_score_of, run, cloud)
    score = np.asarray(score_at(params).score, np.float64)
    root = np.asarray(em.root(state.optim_state.complete)[0], np.float64)
    covariance = root @ root.T
    for _ in range(_DIFFERENCES):
        last = covariance
        found = _differences(score_at, params, last, _SHORT_DIFFERENCE)
        known = information.invert(found, run.fixed.layout.is_free)
        covariance = known.covariance
        if not known.determined.all() or _is_alike(covariance, last):
            break
    return found._replace(score=score.mean(0), score_noise=_covariance_of_mean(score))


def _is_alike(first: np.ndarray, second: np.ndarray) -> bool:
    """Tell whether standard errors are alike, so that differences had the right lengths."""
    ratio = np.sqrt(np.diag(first) / np.diag(second))
    return bool(np.all(np.abs(np.log(ratio)) < 0.3))


def _score_of(run: Run, cloud: Cloud, params: Array) -> Score:
    """Find the score of the marginal likelihood on particles."""
    num_particles = cloud.position.shape[0] * cloud.position.shape[1]
    run.num_evaluations += num_particles * (1 + params.size)
    program = run.programs.ready(estimation.score_of_particles)
    score: Score = fetch(program(run.fixed, run.placed, params, cloud))
    return score


# -- several components ----------------------------------------------------------------


def _conclude_apart(
    run: Run, state: State, params: Array, rng_key: PRNGKey
) -> tuple[State, Array, Bridge, Information | None, Compared | None]:
    score_key, draw_key = random.split(rng_key)
    state, clouds = _rest(run, state, params)
    found = _inform(run, params, clouds[:1]) if run.informs else None
    fitted = run.programs.ready(estimation.fit_loo)(run.fixed, clouds)
    num_draws = run.fixed.settings.num_draws
    if found is not None and _ascended(run, state):
        points = estimation.sobol_blocks(run.fixed, num_draws // _SCORE_SHARE)
        uncertainty = information.invert(found, run.fixed.layout.is_free)
        covariance = np.nan_to_num(uncertainty.covariance)
        for index in range(_ROUNDS):
            draws = Draws(score_key, points, *fitted)
            score_at = partial(_score_at, run, draws)
            better, score = _maximise(score_at, params, covariance, index > 0)
            if better is params:
                break
            # Draws serve near the params where they were fitted: see whether new ones agree.
            params = better
            state = run_steps(run, state, REST, SETTLE, params, SETTLE)
            state, clouds = _rest(run, state, params)
            fitted = run.programs.ready(estimation.fit_loo)(run.fixed, clouds)
        else:
            draws = Draws(score_key, points, *fitted)
            score = np.asarray(_score_at(run, draws, params).score, np.float64)
        found = _inform_apart(run, params, clouds, draws)._replace(
            score=score.mean(0), score_noise=_covariance_of_mean(score)
        )
    draws = Draws(draw_key, estimation.sobol_blocks(run.fixed, num_draws), *fitted)
    sampled = estimation.sample(run.fixed, run.placed, params, draws, clouds)
    run.num_evaluations += run.fixed.settings.num_islands * num_draws
    found_each = fetch(sampled)
    run.heavy_tail = _heavy_tail(run, params, draws, np.asarray(found_each.ess))
    if _can_redraw(run, np.asarray(found_each.ess)):
        state = state._replace(cloud=_redraw(run, state, params, draws))
    bridge = importance.summed(found_each, fetch(draws.level))
    return state, params, bridge, found, None


def _can_redraw(run: Run, shares: np.ndarray) -> bool:
    """Tell whether importance draws are good and few enough to take particles from."""
    settings, layout = run.fixed.settings, run.fixed.layout
    size = settings.num_islands * _redrawn_from(run) * layout.dim
    few = layout.partition.has_small_components and size <= _MOST_REDRAWN
    return few and bool(shares.min() > _UNEQUAL)


def _redrawn_from(run: Run) -> int:
    """Return how many draws of an island its particles are taken from: twice as many."""
    wanted = 2 ** math.ceil(math.log2(2 * run.fixed.settings.num_particles))
    return min(wanted, run.fixed.settings.num_draws)


def _redraw(run: Run, state: State, params: Array, draws: Draws) -> Cloud:
    """Replace the particles of small components by importance draws.

    These are nearly independent, where particles descend from each other.
    """
    points = estimation.sobol_blocks(run.fixed, _redrawn_from(run))
    few = Draws(random.fold_in(draws.rng_key, 1), points, draws.proposal, draws.level)
    key = random.fold_in(state.rng_key, 5)
    position, potential = estimation.redraw(run.fixed, key, run.placed, params, few)
    run.num_evaluations += points.shape[0] * points.shape[1] * len(position)
    equal = jnp.zeros_like(state.cloud.log_weight)
    return state.cloud._replace(position=position, potential=potential, log_weight=equal)


def _heavy_tail(
    run: Run, params: Array, draws: Draws, shares: np.ndarray
) -> HeavyTail | None:
    """Look at the weights of the small component where they are the most unequal."""
    shares = np.where(run.fixed.layout.partition.is_small, shares, 1.0)
    worst = int(np.argmin(shares))
    if shares[worst] > _UNEQUAL:
        return None
    drawn = estimation.log_weights(run.fixed, run.placed, params, draws, np.asarray(worst))
    run.num_evaluations += run.fixed.settings.num_islands * run.fixed.settings.num_draws
    tail = pareto.shape(fetch(drawn))
    return None if tail < pareto.UNRELIABLE else HeavyTail(worst, tail)


def _covariance_of_mean(score: np.ndarray) -> np.ndarray:
    """Return the noise of the mean over islands (rows)."""
    num_islands, num_params = score.shape
    return np.cov(score.T).reshape(num_params, num_params) / num_islands


def _inform_apart(
    run: Run, params: Array, clouds: list[Cloud], draws: Draws
) -> Information:
    """Find the information by particles or by draws, whichever have less noise.

    Particles that follow the params where posteriors are nearly Gaussian, quasi-random
    draws where they are skewed and have few dimensions.
    """
    enough = max(1, math.ceil(_PRECISE / clouds[0].log_weight.size))
    found = _inform(run, params, clouds[:enough])
    uncertainty = information.invert(found, run.fixed.layout.is_free)
    few = run.fixed.layout.partition.has_small_components
    if not (few and uncertainty.determined.all()):
        return found
    complete = np.asarray(_average(run, params, clouds[0], False).curvature).mean(0)
    score_at = partial(_score_at, run, draws)
    root = np.linalg.cholesky(uncertainty.covariance)
    known = np.sqrt(np.maximum(np.diag(root.T @ complete @ root), 1.0))
    drawn = _differences(score_at, params, uncertainty.covariance, _DIFFERENCE / known)
    return drawn if information.is_quieter(drawn, found) else found


def _differences(
    score_at: Callable[[Array], Score],
    params: Array,
    covariance: np.ndarray,
    lengths: np.ndarray | float,
) -> Information:
    """Find the information by differences of the score on common draws.

    Parameters
    ----------
    score_at
        The score at some parameters, always on the same draws.
    covariance
        Of the estimate, about: along its axes rounding is not amplified.
    lengths
        Of the differences along these axes, in standard errors.
    """
    root = np.linalg.cholesky(covariance)
    columns = []
    each = np.broadcast_to(lengths, len(root))
    for direction, length in zip(root.T, each, strict=True):
        ahead, behind = (
            score_at(params + jnp.asarray(sign * direction, params.dtype))
            for sign in (length, -length)
        )
        change = np.subtract(ahead.score, behind.score, dtype=np.float64)
        columns.append(change @ root / (2 * length))
    white = np.stack(columns, -1)
    inverse = np.linalg.inv(root)
    observed = inverse.T @ (white + np.swapaxes(white, 1, 2)) @ inverse / 2
    error = observed.std(0, ddof=1) / np.sqrt(len(observed))
    nan = np.full_like(error, np.nan)
    return Information(nan[0], nan, observed.mean(0), error)


def _score_at(run: Run, draws: Draws, params: Array) -> Score:
    """Find the score of the marginal likelihood on common draws."""
    num_draws = math.prod(draws.points.shape[:2])
    run.num_evaluations += 3 * run.fixed.settings.num_islands * num_draws
    score: Score = fetch(estimation.score(run.fixed, run.placed, params, draws))
    return score


def _maximise(
    score_at: Callable[[Array], Score],
    params: Array,
    covariance: np.ndarray,
    again: bool,
) -> tuple[Array, np.ndarray]:
    """Climb to the maximum of the log-likelihood by Newton's method on common draws.

    The same draws at all parameters make it a smooth function of them. With ``again`` this
    was done before on other draws, and a gain within their noise is left. Returns the
    parameters, and the score of each island there.
    """
    here = score_at(params)
    noise = _covariance_of_mean(np.asarray(here.score, np.float64))
    enough = max(_ENOUGH, 0.5 * np.trace(covariance @ noise)) if again else _ENOUGH
    for _ in range(_NEWTON_STEPS):
        slope = np.asarray(here.score, np.float64).mean(0)
        step = -covariance @ slope
        if -0.5 * slope @ step < enough:
            break
        # Where the likelihood is far from a quadratic, or draws do not reach.
        for _ in range(_HALVINGS):
            there = params + jnp.asarray(step, params.dtype)
            new = score_at(there)
            covers = new.ess >= _COVERS * here.ess
            if covers and new.log_evidence >= here.log_evidence:
                break
            step = step / 2
        else:
            break
        params, here = there, new
    return params, np.asarray(here.score, np.float64)


# -- information -----------------------------------------------------------------------


def _average(run: Run, params: Array, cloud: Cloud, follows: bool) -> Moments:
    """Average over a cloud what the information needs."""
    num_particles = cloud.position.shape[0] * cloud.position.shape[1]
    run.num_evaluations += num_particles * (1 + 2 * params.size)
    louis = run.programs.ready(estimation.louis)
    return fetch(louis(run.fixed, run.placed, params, cloud, np.asarray(follows)))


def _inform(run: Run, params: Array, clouds: list[Cloud]) -> Information:
    """Find what the data say about the parameters, by Louis's identity."""
    average = partial(_average, run, params)
    if run.fixed.settings.num_islands == 1:  # nothing tells noise from curvature
        return information.combine([average(clouds[0], False)])
    # A linear flow serves where the posterior is nearly Gaussian, else it may add noise.
    following, plain = (average(clouds[0], follows) for follows in (True, False))
    follows = information.is_quieter(
        *(information.combine([m]) for m in (following, plain))
    )
    first = following if follows else plain
    rest = [average(cloud, follows) for cloud in clouds[1:]]
    return information.combine([first, *rest])
