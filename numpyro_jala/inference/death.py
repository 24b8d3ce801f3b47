"""When nearly all particles die: where that was, and which site has no density there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine.state import State
from numpyro_jala.inference.record import Run
from numpyro_jala.model.validation import describe_dead_place, describe_values

#: Places near the particles that are looked at, and most numbers of all of them.
_FEWEST, _MOST, _MOST_NUMBERS = 8, 1024, 2**22


class DeathError(RuntimeError):
    """Nearly every particle of a component came to a place without a density."""


def describe(run: Run, state: State, component: int, num_steps: int) -> str:
    """Say that the particles died soon after a state, where, and what to do."""
    layout, where, near = run.fixed.layout, "", ""
    if not layout.partition.is_joint:
        first = int(np.flatnonzero(layout.partition.owner == component)[0])
        where = f" in the component of latent {layout.label(first)}"
    params = layout.constrain_params(state.target.params)
    if params:
        near = f", near the parameters {describe_values(params)}"
    said = (
        f"Nearly every particle{where} came to a non-finite log-density, or lost all "
        f"weight, within the last {num_steps} steps{near}. {_look_around(run, state)}"
    )
    return f"{said}{_advise(run)} The last good state is kept in last_state."


def _advise(run: Run) -> str:
    step_size = run.fixed.settings.step_size
    if step_size is not None:
        return (
            f"step_size={step_size} may be too large: try a smaller one, or leave it out."
        )
    if run.fixed.layout.init_params.size:
        return "Start from other params, or check the model there."
    return "Check the model there, or turn on double precision (jax_enable_x64)."


def _look_around(run: Run, state: State) -> str:
    """Name the sites without a finite log-density near the particles, or far latents."""
    if run.data.mode is not None:
        return ""  # the particles are not latents
    layout, params = run.fixed.layout, state.target.params
    places = _near(state)
    joint, one = layout.joint(run.data.arrays), jnp.ones((), params.dtype)
    each = jax.vmap(jax.value_and_grad(lambda x: joint(params, one, x)))
    evaluate = jax.jit(each, compiler_options=compilation.QUICK)
    value, gradient = map(np.asarray, evaluate(places))
    is_bad = ~(np.isfinite(value) & np.isfinite(gradient).all(-1))
    if not is_bad.any():
        return _name_farthest(run, np.asarray(places))
    worst = int(np.argmax(is_bad))
    found = describe_dead_place(
        layout, params, places[worst], run.data.arrays, gradient[worst]
    )
    return f"Of places near the particles {is_bad.mean():.0%} have none: {found} "


def _near(state: State) -> Array:
    """Return places about as far from the particles as these are from each other."""
    position = fetch(state.cloud.position)
    dim = position.shape[-1]
    count = int(np.clip(_MOST_NUMBERS // dim, _FEWEST, _MOST))
    position = jnp.asarray(position.reshape(-1, dim)[:count])
    noise = random.normal(random.key(0), position.shape, position.dtype)
    return position + jnp.nan_to_num(position.std(0)) * noise


def _name_farthest(run: Run, places: np.ndarray) -> str:
    row, column = np.unravel_index(np.argmax(np.abs(places)), places.shape)
    label, value = run.fixed.layout.label(int(column)), places[row, column]
    return (
        "The log-density is finite near the particles, of which the farthest has "
        f"{label} = {value:.3g} on the unconstrained scale. "
    )
