"""How far a run has come, and when its EM steps are enough.

Whether to go on is asked after certain numbers of steps, and depends only on what the run
has kept and on its state: one that was killed and resumed stops where it would have.
"""

from __future__ import annotations

import copy

import numpy as np

from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import em
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.state import EM_STEP, Info, State
from numpyro_jala.inference import options
from numpyro_jala.inference.conclusion import conclude
from numpyro_jala.inference.information import LEAST
from numpyro_jala.inference.loop import Until
from numpyro_jala.inference.record import Look, Run

#: Of a given number of steps, the part after which the log-evidence is looked at.
_FIRST_PART = 0.75
#: Fewest steps of which a part says anything.
_FEWEST_STEPS = 4

#: Most steps that are taken where no number is given.
MOST_STEPS = 2_000
#: Newton steps: how often to ask whether they are enough, the fewest that are where one
#: component's particles have the last word, the fewest on a flat, and the fewest after which
#: noise may be what is left. Of several components draws find the maximum in the end, and in
#: coordinates of the mode the scores of particles at rest.
_ASK_EVERY, _FEWEST_NEWTON, _FEWEST_FLAT, _FEWEST_NOISY = 10, 20, 50, 100
#: How many times as many nats from the maximum the ascent may end for each small component:
#: draws cover the rest, and the weights of each hardly feel it. Ten steps then do for ten
#: thousand groups and for a million. With three nested effects, whose draws are poorer, a
#: quarter of a nat left an estimate 0.06 standard errors off.
_COVERED = 2.5e-3
#: Means of the params that are compared, each over an eighth of the steps.
_NUM_MEANS = 4
#: Decrements that do not fall by this share from a quarter of the steps to the next are noise.
_STILL_FALLS = 0.8
#: The first look at an optimiser's run. Each look is worth some fifty steps, so that it has
#: taken twice as many at the next.
_FIRST_LOOK = 100
#: Nats to the maximum that noise may hide.
_HIDDEN = 0.1


def schedule(run: Run, num_steps: int | None, tol: float) -> Until:
    """Return what says up to which number of steps to go on.

    Parameters
    ----------
    num_steps
        Where that is all; None: as many as it takes.
    tol
        Nats to the maximum that are near enough.
    """
    if num_steps is not None:
        return _exactly(run, num_steps)
    if run.fixed.settings.newton:
        return _until_at_rest(run, tol)
    options.check_can_tell(run.fixed.settings.num_islands)
    return _until_no_rise(run, tol)


# -- a number of steps -------------------------------------------------------------------


def _exactly(run: Run, num_steps: int) -> Until:
    """Take so many steps, and look before the last of them if nothing else would tell."""
    first = _num_first_steps(run, num_steps)

    def until(done: int, state: State) -> int:
        if done < first:
            return first
        if done == first and not _has_looked(run):
            look(run, state)
        return num_steps

    return until


def _num_first_steps(run: Run, num_steps: int) -> int:
    """Return after how many steps to look, or -1 for not at all."""
    settings, num_params = run.fixed.settings, run.fixed.layout.init_params.size
    if num_params <= em.FEW_PARAMS or settings.num_islands == 1:
        return -1
    return int(_FIRST_PART * num_steps) if num_steps >= _FEWEST_STEPS else -1


# -- as many steps as it takes -----------------------------------------------------------


def _until_at_rest(run: Run, tol: float) -> Until:
    """Take Newton steps until their records say that the params have arrived."""
    partition = run.fixed.layout.partition
    is_last_word = partition.is_joint and run.data.mode is None
    fewest = _FEWEST_NEWTON if is_last_word else _ASK_EVERY
    near = tol * _share_of_draws(partition)

    def until(done: int, state: State) -> int:
        if done % _ASK_EVERY or done < fewest:
            return max(done - done % _ASK_EVERY + _ASK_EVERY, fewest)
        newton = fetch(state.optim_state)
        may_stop = done >= _FEWEST_FLAT or not is_flat(newton, run.fixed.layout.is_free)
        if may_stop and is_at_rest(run.infos(EM_STEP), newton, near):
            return done
        return _or_give_up(run, done, done + _ASK_EVERY, tol)

    return until


def _share_of_draws(partition: Partition) -> float:
    """Return how many times the tolerance draws of small components are sure to cover."""
    if not partition.has_small_components:
        return 1.0
    return max(1.0, _COVERED * partition.num_components)


def _or_give_up(run: Run, done: int, further: int, tol: float) -> int:
    """Go on, unless that were too many steps."""
    if done < MOST_STEPS:
        return min(further, MOST_STEPS)
    run.given_up = tol
    return done


def is_flat(newton: em.Newton, is_free: np.ndarray) -> bool:
    """Tell whether the data say hardly anything of some constrained param where it is now.

    There a score is small far from the maximum, as that of a scale near zero.
    """
    observed = np.diag(newton.complete) - np.diag(newton.missing)
    return bool(np.any(observed[~np.asarray(is_free)] < LEAST))


def is_at_rest(infos: Info, newton: em.Newton, tol: float) -> bool:
    """Tell whether the params have arrived, as near as they will come.

    The scatter of their means is below ``tol``, and so is their Newton decrement, unless it
    has ceased to fall: then it is that of the score's noise.
    """
    if not scatter_of_means(np.asarray(infos.params), newton) < tol:
        return False
    quarter = len(infos.newton_decrement) // 4
    last, before = (
        float(np.median(infos.newton_decrement[-k * quarter :][:quarter])) for k in (1, 2)
    )
    is_noise = len(infos.newton_decrement) >= _FEWEST_NOISY and last > _STILL_FALLS * before
    return last < tol or is_noise


def scatter_of_means(params: np.ndarray, newton: em.Newton) -> float:
    r"""Return the scatter of the params' means over the last eighths of the steps, in nats.

    With :math:`d_i` the difference between the mean over the i-th of the last four eighths
    and that over all four, it is :math:`\frac12 \frac13 \sum_i d_i^\top I d_i`. Of params
    that fluctuate it is four times the error of their mean over all four, and of params that
    travel it tells how fast.

    Parameters
    ----------
    params
        Of each step, (num_steps, num_params).
    newton
        What the optimiser remembers of the information.
    """
    size = len(params) // 8
    steps = np.asarray(params[-_NUM_MEANS * size :], np.float64)
    means = steps.reshape(_NUM_MEANS, size, -1).mean(1)
    apart = means - means.mean(0)
    complete, missing = (
        np.sum(apart @ np.asarray(matrix, np.float64) * apart) / (_NUM_MEANS - 1)
        for matrix in (newton.complete, newton.missing)
    )
    return float(0.5 * max(complete - missing, em.FLOOR * complete))


def _until_no_rise(run: Run, tol: float) -> Until:
    """Take an optimiser's steps until fresh estimates say that they gain nothing."""

    def until(done: int, state: State) -> int:
        goal = _FIRST_LOOK
        while goal < done:
            goal *= 2
        goal = min(goal, max(MOST_STEPS, done))
        if done < goal:
            return goal
        if not _has_looked(run):
            look(run, state)
        return done if has_arrived(run, tol) else _or_give_up(run, done, 2 * done, tol)

    return until


def has_arrived(run: Run, tol: float) -> bool:
    """Tell by the last looks whether the log-likelihood still has to rise.

    The noise of both estimates may hide a small rise.
    """
    now, before = run.looks[-1], run.earlier
    if now.shortfall < tol:
        return True
    if before is None or now.shortfall > _HIDDEN:
        return False
    error = np.hypot(now.standard_error, before.standard_error)
    return bool(now.log_evidence - before.log_evidence < max(tol, error))


# -- a look ------------------------------------------------------------------------------


def _has_looked(run: Run) -> bool:
    """Tell whether a look was taken after as many steps as there are now."""
    return bool(run.looks) and run.looks[-1].num_steps == run.count(EM_STEP)


def look(run: Run, state: State) -> None:
    """Estimate as at the end of a run, and leave the run as it is.

    The log-evidence along the path would not do: it is biased by params that ascend on the
    particles.
    """
    probe = copy.copy(run)
    probe._infos = {stage: list(parts) for stage, parts in run._infos.items()}
    conclude(probe, state)
    run.num_evaluations = probe.num_evaluations
    bridge, uncertainty = probe.result.bridge, probe.result.uncertainty
    seen = Look(
        run.count(EM_STEP),
        float(np.asarray(bridge.log_evidence)),
        float(np.asarray(bridge.standard_error)),
        float("nan") if uncertainty is None else uncertainty.shortfall,
    )
    run.looks.append(seen)
