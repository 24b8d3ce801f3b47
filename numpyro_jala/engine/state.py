"""What a step along the path of targets depends on, remembers and reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from numpyro_jala._typing import Array, Potential, PRNGKey, Tree
from numpyro_jala.engine import em
from numpyro_jala.engine.smc import Cloud, Target
from numpyro_jala.engine.tempering import DROP

#: Stages: equilibrate at given parameters, anneal while the parameters move or at fixed ones,
#: or take EM steps.
REST, ANNEAL, EM_STEP, ANNEAL_FIXED = 0, 1, 2, 3


#: A trace of more parameters than this is not kept.
_MOST_TRACED = 10_000


class Settings(NamedTuple):
    """What a compilation depends on beside the model."""

    num_islands: int
    num_particles: int  # in one island
    step_size: float | None
    preconditioner: str  # "dense", "diagonal" or "none"
    resampling: str
    ess_threshold: float
    optimiser: em.Optimiser | None
    newton: bool  # the default for few parameters
    trusted: bool  # shorten the optimiser's steps
    annealing_effort: float
    mesh: Mesh | None  # whose devices share the islands

    @property
    def adapts(self) -> bool:
        """Whether an island learns from the others."""
        return self.preconditioner != "none"

    @property
    def moves_per_temperature(self) -> int:
        """Moves of the particles between two rises of the temperature."""
        return math.ceil(self.annealing_effort**0.5)

    @property
    def temperature_drop(self) -> float:
        """Share of the effective sample size that a rise of the temperature may cost."""
        finer = self.annealing_effort / self.moves_per_temperature
        return DROP / finer**2


class Problem(NamedTuple):
    """What is asked: a potential, and how its parameters look to an optimiser."""

    potential_fn: Potential
    unravel: Callable[[Array], Tree]
    ravel: Callable[[Tree], Array]
    is_free: Array  # (num_params,), parameters on the real line
    rough_gradient: bool  # may be less precise than the potential
    block: int | None  # particles of an island to evaluate at a time, None for all


class Plan(NamedTuple):
    """The next target, and how to get there.

    score
        The weighted mean of the scores, with their control variates.
    newton_decrement
        Nats that a full Newton step would gain, zero where there is none.
    cost
        Variance of the log-weights that the planned change of parameters causes.
    """

    target: Target
    transport_shift: Array  # (num_islands, dim, columns)
    transport_learned: Array  # (num_islands, dim, columns)
    score: Array  # (num_params,)
    newton_decrement: Array  # ()
    cost: Array  # ()


class State(NamedTuple):
    """All that the next step depends on."""

    rng_key: PRNGKey
    num_moves: Array  # ()
    num_steps: Array  # (), of these with the parameters ascending
    target: Target
    plan: Plan
    cloud: Cloud
    log_step_size: Array  # (num_islands,)
    factor: Array  # (num_islands, ...)
    optim_state: Any
    mean_params: Array  # (num_params,)


class Info(NamedTuple):
    """What a user may want to watch."""

    params: Array  # (num_params,), or (0,) if these are very many
    temperature: Array  # (num_islands,)
    log_evidence: Array  # (num_islands,)
    ess: Array  # (num_islands,), before resampling
    resampled: Array  # (num_islands,)
    step_size: Array  # (num_islands,)
    grad_norm: Array  # ()
    newton_decrement: Array  # ()
    died: Array  # ()


def traced(params: Array) -> Array:
    """Return the parameters if they are few enough to keep those of every step."""
    return params if params.size <= _MOST_TRACED else params[:0]


def no_info(state: State) -> Info:
    """Return an info of zeros, with the shapes that a step's info has."""
    islands = jnp.zeros_like(state.log_step_size)
    zero = jnp.zeros((), islands.dtype)
    return Info(
        params=jnp.zeros_like(traced(state.target.params)),
        temperature=islands,
        log_evidence=islands,
        ess=islands,
        resampled=islands.astype(bool),
        step_size=islands,
        grad_norm=zero,
        newton_decrement=zero,
        died=jnp.zeros((), int),
    )
