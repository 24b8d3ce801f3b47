"""What a step along the path of targets depends on, remembers and reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from numpyro_jala._typing import Array, Potential, PRNGKey, Tree
from numpyro_jala.engine import em
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.factor import Factor
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.smc import Cloud
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
    most_dense: int | None  # largest component with a dense factor; None: no factor
    resampling: str
    ess_threshold: float
    optimiser: em.Optimiser | None
    newton: bool  # the default for few parameters
    trusted: bool  # shorten the optimiser's steps
    annealing_effort: float
    num_draws: int  # of an island, for importance sampling
    mesh: Mesh | None  # whose devices share the islands
    takes_turns: bool = False  # particles and params move in turn, also in EM steps

    @property
    def adapts(self) -> bool:
        """Whether an island learns from the others."""
        return self.most_dense is not None

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
    """What is asked: a potential, and how its parameters look to an optimiser.

    potential_at
        Returns the potential near given parameters, where the coordinates of the particles
        depend on them; None if they do not.
    """

    potential_fn: Potential
    potential_at: Callable[[Array], Potential] | None
    partition: Partition
    scores_at_once: bool  # found with the gradient, else apart where a plan needs them
    unravel: Callable[[Array], Tree]
    ravel: Callable[[Tree], Array]
    is_free: Array  # (num_params,), parameters on the real line
    rough_gradient: bool  # may be less precise than the potential
    block: int | None  # particles of an island to evaluate at a time, None for all

    def near(self, params: Array) -> Problem:
        """Return the problem with its potential near some parameters."""
        if self.potential_at is None:
            return self
        return self._replace(potential_fn=self.potential_at(params))


class Plan(NamedTuple):
    """The next target, and how to get there.

    score
        The weighted mean of the scores, with their control variates.
    newton_decrement
        Nats that a full Newton step would gain, zero where there is none.
    cost
        Variance of the log-weights that the planned change of parameters causes, averaged
        over components.
    """

    target: Target
    transport_shift: Array  # (num_islands, columns, dim)
    transport_learned: Array  # (num_islands, columns, dim)
    score: Array  # (num_params,)
    newton_decrement: Array  # ()
    cost: Array  # ()


class State(NamedTuple):
    """All that the next step depends on.

    rng_key
        Split by each step.
    num_moves, num_steps
        Moves of the particles so far, and how many of them were EM steps.
    target
        Parameters, unconstrained and flat, and the temperature of each component.
    plan
        The next target, chosen at the end of the last step.
    cloud
        The weighted particles.
    log_step_size, factor
        Step sizes of the Langevin moves, and the preconditioner.
    optim_state
        Of the Optax optimiser, if there is one.
    mean_params
        The average of the parameters over the last EM steps.
    mode
        Near that of the posterior, if the particles live in the coordinates of
        :mod:`~numpyro_jala.engine.laplace`; None if they are latents.
    num_scaled
        How many latent sites are in units of a latent scale.
    """

    rng_key: PRNGKey
    num_moves: Array  # ()
    num_steps: Array  # ()
    target: Target
    plan: Plan
    cloud: Cloud
    log_step_size: Array  # (num_islands, components)
    factor: Factor
    optim_state: Any
    mean_params: Array  # (num_params,)
    mode: Array | None = None  # (dim,)
    num_scaled: Array | int = 0  # ()


class Info(NamedTuple):
    """What a user may want to watch.

    temperature
        The lowest of all islands and components.
    log_evidence, log_evidence_se
        Along the path, summed over components, and its standard error from the islands.
    ess, ess_lowest
        Before resampling: the median over components of their mean over islands, and the
        lowest of all.
    resampled
        Share of islands and components that were resampled.
    step_size
        The mean over islands and components.
    grad_norm
        Norm of the estimated gradient of the log marginal likelihood.
    newton_decrement
        Nats that a full Newton step would gain.
    died
        Particles that came to a density that is not finite.
    """

    params: Array  # (num_params,), or (0,) if these are very many
    temperature: Array  # ()
    log_evidence: Array  # ()
    log_evidence_se: Array  # ()
    ess: Array  # ()
    ess_lowest: Array  # ()
    resampled: Array  # ()
    step_size: Array  # ()
    grad_norm: Array  # ()
    newton_decrement: Array  # ()
    died: Array  # ()


def traced(params: Array) -> Array:
    """Return the parameters if they are few enough to keep those of every step."""
    return params if params.size <= _MOST_TRACED else params[:0]


def together(first: Info, second: Info) -> Info:
    """Return the info of a step that has two moves."""
    return second._replace(
        resampled=jnp.maximum(first.resampled, second.resampled),
        died=first.died + second.died,
    )


def no_info(state: State) -> Info:
    """Return an info of zeros, with the shapes that a step's info has."""
    params = jnp.zeros_like(traced(state.target.params))
    zero = jnp.zeros((), state.log_step_size.dtype)
    return Info(
        params=params,
        temperature=zero,
        log_evidence=zero,
        log_evidence_se=zero,
        ess=zero,
        ess_lowest=zero,
        resampled=zero,
        step_size=zero,
        grad_norm=zero,
        newton_decrement=zero,
        died=jnp.zeros((), int),
    )
