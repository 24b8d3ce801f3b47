"""How a run of several components ends.

A run, its state at rest at the estimate and the estimate come in. Each component has
importance draws from a proposal that its particles define: they give the maximum, the
information there and the evidence, and in the end the particles of small components.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine.state import State
from numpyro_jala.engine.weights import effective_fraction
from numpyro_jala.inference import (
    clouds,
    estimation,
    importance,
    information,
    laplace_component,
    newton,
    pareto,
)
from numpyro_jala.inference.clouds import AtRest
from numpyro_jala.inference.draws import (
    Draws,
    define_draws,
    num_for_particles,
    num_for_score,
)
from numpyro_jala.inference.estimation import Score
from numpyro_jala.inference.information import Information
from numpyro_jala.inference.record import Ending, HeavyTail, Run
from numpyro_jala.inference.snapshots import Snapshot

#: Components from which fewer draws serve for the information: its noise falls with the
#: root of their number, and with the draws, which are quasi-random, about in proportion.
_FEW_COMPONENTS = 1_000
#: Effective share of a component's draws below which the tail of its weights is looked at.
_UNEQUAL = 0.2
#: Draws of an island that tell the information about large components, at a time. With 512
#: the standard errors of three nested effects were off by 0.8 %, with ten clouds by 2 %.
_NUM_INFORMING = 512
#: Monte Carlo error of standard errors, as a share of them, that is small enough, and most
#: clouds, of draws and of particles, that are taken for it.
_PRECISE, _MOST_DRAWN, _MOST_CLOUDS = 0.004, 4, 10


def conclude_several(run: Run, state: State, params: Array, rng_key: PRNGKey) -> Ending:
    """Climb to the maximum, and find the evidence and the information there."""
    score_key, draw_key = random.split(rng_key)
    if run.data.mode is None:
        here = clouds.keep(run, state, params)
        found = clouds.inform(run, params, here.clouds[:1]) if run.informs else None
        if found is not None and run.maximises(state):
            here, found = _climb(run, score_key, here, found)
    else:
        here = laplace_component.rest(run, state, params)
        found = laplace_component.inform(run, here) if run.informs else None
    num_draws = run.fixed.settings.num_draws
    draws = _draws(run, draw_key, here, num_draws)
    run.num_evaluations += run.fixed.settings.num_islands * num_draws
    at = run.fixed, run.placed, here.params, draws
    # Small components need no bridge, and may have kept no clouds at the maximum.
    is_small = run.fixed.layout.partition.has_small_components
    sample = run.programs.ready(estimation.sample)
    sampled = fetch(sample(*at, [] if is_small else here.clouds))
    shares = np.asarray(sampled.ess)
    run.heavy_tail = _heavy_tail(run, here.params, draws, shares)
    level = np.asarray(fetch(draws.level))
    bridge, each = importance.summed(sampled, level), importance.each(sampled, level)
    state = _redrawn(run, draw_key, here, shares)
    return Ending(state, here.params, bridge, found, by_component=each)


def _draws(
    run: Run, rng_key: PRNGKey, here: AtRest, num_draws: int, motion: Array | None = None
) -> Draws:
    """Define draws from the proposals of particles at rest."""
    proposal = here.gaussian, here.level, here.params
    return define_draws(run.fixed, rng_key, num_draws, *proposal, motion)


# -- the maximum -------------------------------------------------------------------------


def _climb(
    run: Run, rng_key: PRNGKey, here: AtRest, found: Information
) -> tuple[AtRest, Information]:
    """Climb to the maximum on draws, rest there, and find the information."""
    covariance = _rough_covariance(run, found)
    if covariance is None:
        covariance = np.nan_to_num(run.uncertainty(found).covariance)
    num_draws = num_for_score(run.fixed)
    for index in range(newton.ROUNDS):
        draws = _draws(run, rng_key, here, num_draws, found.motion)
        score_at = partial(_score, run, draws)
        better, score, as_new = newton.maximise(
            score_at, here.params, covariance, index > 0
        )
        if better is here.params:
            break
        state = clouds.go(run, here.state, better)
        if as_new and run.fixed.layout.partition.has_small_components:
            proposal = draws.at(better).proposal
            here = AtRest(state, better, [], proposal, here.level)
            break
        # Draws serve near the params where they were fitted: see whether new ones agree.
        here = clouds.keep(run, state, better)
    else:
        draws = _draws(run, rng_key, here, num_draws, found.motion)
        score = newton.by_island(_score(run, draws, here.params))
    return here, newton.with_score(_inform(run, rng_key, here, draws), score)


def _score(run: Run, draws: Draws, params: Array) -> Score:
    """Find the score of the marginal likelihood on common draws."""
    run.num_evaluations += 2 * run.fixed.settings.num_islands * int(draws.num_draws)
    program = run.programs.ready(estimation.score)
    score: Score = fetch(program(run.fixed, run.placed, params, draws))
    return score


def _inform(run: Run, rng_key: PRNGKey, here: AtRest, draws: Draws) -> Information:
    """Find the information by Louis's identity or by differences, whichever have less noise.

    The first where posteriors are Gaussian or have many dimensions; in both what is
    averaged over follows the params.
    """
    params = here.params
    is_small = run.fixed.layout.partition.has_small_components
    kept = here.clouds[:1] or clouds.collect(run, here.state, params, 1)[1]
    several = kept if is_small else _several_clouds(run, rng_key, here)
    found = clouds.inform(run, params, several, _PRECISE)
    covariance, determined = run.uncertainty(found)[:2]
    rough = _rough_covariance(run, found)
    is_known = determined.all() or rough is not None
    if not (is_small and is_known):
        return found
    covariance = covariance if rough is None else rough
    num_components = run.fixed.layout.partition.num_components
    saved = math.sqrt(max(num_components / _FEW_COMPONENTS, 1.0))
    score_at = partial(_score, run, draws.fewer(round(int(draws.num_draws) / saved)))
    drawn = newton.differences(score_at, params, covariance)
    drawn = drawn._replace(by_component=found.by_component)
    if rough is not None:  # the better is the one that tells of more params
        knows = run.uncertainty(drawn).determined
        return drawn if knows.sum() > determined.sum() else found
    better = information.is_quieter(drawn, found) or information.is_biased(found, drawn)
    return drawn if better else found


def _several_clouds(run: Run, rng_key: PRNGKey, here: AtRest) -> Iterator[Snapshot]:
    """Yield clouds at the params: draws unless their weights are poor, and then particles.

    Draws are quasi-random, and more of them cost no moves.
    """
    for index in range(_MOST_DRAWN):
        draws = _draws(run, random.fold_in(rng_key, 1 + index), here, _NUM_INFORMING)
        drawn = estimation.weigh(run.fixed, run.placed, here.params, draws)
        run.num_evaluations += run.fixed.settings.num_islands * _NUM_INFORMING
        if not float(effective_fraction(drawn.log_weight).min()) > _UNEQUAL:
            yield from _clouds_of_particles(run, here)
            return
        yield Snapshot(drawn.log_weight, drawn.position, drawn.potential, None)


def _clouds_of_particles(run: Run, here: AtRest) -> Iterator[Snapshot]:
    """Yield the clouds that were kept, and then further ones."""
    yield from here.clouds[:_MOST_CLOUDS]
    state = here.state
    for _ in range(_MOST_CLOUDS - len(here.clouds)):
        state, more = clouds.collect(run, state, here.params, 1)
        yield from more


def _rough_covariance(run: Run, found: Information) -> np.ndarray | None:
    """Return what scores say where second derivatives do not tell of all params."""
    determined = run.uncertainty(found).determined
    return None if determined.all() else information.from_scores(found)


# -- the draws ---------------------------------------------------------------------------


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


def _redrawn(run: Run, rng_key: PRNGKey, here: AtRest, shares: np.ndarray) -> State:
    """Replace the particles of small components by draws, if these are good and few."""
    num_draws = num_for_particles(run.fixed)
    if not (num_draws and shares.min() > _UNEQUAL):
        return here.state
    draws = _draws(run, random.fold_in(rng_key, 1), here, num_draws)
    weigh = run.programs.ready(estimation.weigh)
    drawn = weigh(run.fixed, run.placed, here.params, draws)
    run.num_evaluations += run.fixed.settings.num_islands * num_draws
    return clouds.redrawn(run, here.state, drawn)
