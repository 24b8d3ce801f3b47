"""How a run of one component ends.

A run, its state at rest at the estimate and the estimate come in. The estimate is improved,
its evidence found by a bridge and, of few latents, by importance sampling too.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine import em, mixture
from numpyro_jala.engine.state import State
from numpyro_jala.inference import (
    clouds,
    estimation,
    evidence,
    information,
    laplace_component,
    modes,
    pareto,
)
from numpyro_jala.inference.clouds import AtRest
from numpyro_jala.inference.estimation import Weighted
from numpyro_jala.inference.evidence import Bridge, Compared, Gaussian
from numpyro_jala.inference.information import Information
from numpyro_jala.inference.modes import Weighed
from numpyro_jala.inference.programs import CLOUDS, SETTLE
from numpyro_jala.inference.record import Ending, Run

#: In the coordinates of a mode an error bar above so many nats is worth so many more clouds: of
#: stochastic volatility over 300 days they took errors from 0.014 to 0.005, over 80 data sets.
_ROUGH, _MORE = 0.05, 3


def conclude_one(run: Run, state: State, params: Array, rng_key: PRNGKey) -> Ending:
    """Improve the estimate, and find the evidence and the information there."""
    if run.maximises(state):
        improve = _polish if run.data.mode is None else laplace_component.climb
        params, state = improve(run, state, params)
    here = clouds.keep(run, state, params)
    bridge_key, draw_key = random.split(rng_key)
    bridge, compared = _estimate(run, bridge_key, here), None
    if run.data.mode is not None and bridge.standard_error > _ROUGH:
        here = clouds.keep_more(run, here, _MORE * CLOUDS)
        bridge = _estimate(run, random.fold_in(bridge_key, 2), here)
    last = here.clouds[-1]
    if mixture.serves(run.fixed.layout.partition):
        weighed, compared, takes_draws = _compare(run, draw_key, here, bridge)
        if takes_draws:
            bridge, here = compared.drawn, _of_draws(run, here, weighed)
    found = _inform(run, here) if run.informs else None
    return Ending(here.state, params, bridge, found, compared, rounded_alike=last)


def _polish(run: Run, state: State, params: Array) -> tuple[Array, State]:
    """Take a Newton step on what the particles at rest know, and rest there."""
    found = clouds.inform(run, params, [clouds.snapshot(run, state)])
    newton_step = information.newton_step(found, run.uncertainty(found))
    step = jnp.asarray(newton_step, params.dtype)
    if not bool(em.is_near(state.optim_state, step, SETTLE // 2, 1)):
        return params, state
    better = params + step
    return better, clouds.go(run, state, better)


def _inform(run: Run, here: AtRest) -> Information:
    if run.data.mode is None:
        return clouds.inform(run, here.params, here.clouds)
    return laplace_component.inform(run, here)


# -- the evidence ------------------------------------------------------------------------


def _estimate(run: Run, rng_key: PRNGKey, here: AtRest) -> Bridge:
    """Estimate the evidence by the bridge to what covers more of the posterior.

    Not by the one with the smaller error bar, since what is chosen by its error bar has one that
    is too small.
    """
    bridge = _bridge(run, rng_key, here, here.gaussian)
    if run.data.mode is None or mixture.serves(run.fixed.layout.partition):
        return bridge
    # What particles say of very many latents is noise where Laplace is nearly right.
    plain = evidence.standard(here.gaussian)
    other = _bridge(run, random.fold_in(rng_key, 1), here, plain)
    return max(bridge, other, key=lambda each: np.nan_to_num(each.overlap, nan=-1.0))


def _bridge(run: Run, rng_key: PRNGKey, here: AtRest, gaussian: Gaussian) -> Bridge:
    """Estimate the evidence by a bridge to Gaussians."""
    run.num_evaluations += estimation.num_for_draws(run.fixed)
    program, level = run.programs.ready(estimation.bridge_to), here.level
    at = (run.fixed, rng_key, run.placed, here.params, here.clouds)
    return evidence.at_level(fetch(program(*at, gaussian, level)), level[0])


def _compare(
    run: Run, rng_key: PRNGKey, here: AtRest, bridge: Bridge
) -> tuple[Weighed, Compared, bool]:
    """Estimate the evidence by importance sampling; tell whether that is the better."""
    weighed = run.programs.ready(modes.weigh)(
        run.fixed, rng_key, run.placed, here.params, here.clouds, here.level
    )
    run.num_evaluations += modes.num_evaluations(run.fixed)
    drawn = evidence.at_level(modes.estimate(weighed), here.level[0])
    agrees, takes_draws = modes.choose(bridge, drawn, here.level[0])
    tail = pareto.shape(fetch(weighed.log_weight).ravel())
    return weighed, Compared(bridge, drawn, bool(agrees), tail), bool(takes_draws)


def _of_draws(run: Run, here: AtRest, weighed: Weighed) -> AtRest:
    """Take weighted draws as so many clouds, and particles from them."""
    by_component = (each[:, None] for each in (weighed.potential, weighed.log_weight))
    drawn = Weighted(weighed.position, *by_component)
    first, num_clouds = here.clouds[0], len(here.clouds)
    positions = jnp.split(drawn.position, num_clouds, 1)
    log_weights = jnp.split(drawn.log_weight, num_clouds, 2)
    weighted = [
        first._replace(position=x, log_weight=w)
        for x, w in zip(positions, log_weights, strict=True)
    ]
    return here._replace(clouds=weighted, state=clouds.redrawn(run, here.state, drawn))
