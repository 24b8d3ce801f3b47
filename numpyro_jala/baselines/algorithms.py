"""Other algorithms of the same kind, behind the same interface, for comparison.

Each moves particles by unadjusted Langevin steps and takes their plain average. They need
a step size and give no evidence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random

from numpyro_jala._typing import Array, PRNGKey, Tree
from numpyro_jala.backend import cache, compilation
from numpyro_jala.baselines import unweighted
from numpyro_jala.baselines.unweighted import Info, Rule, State
from numpyro_jala.engine import em
from numpyro_jala.engine.state import EM_STEP, Settings, traced
from numpyro_jala.fitter import Fitter
from numpyro_jala.inference import evidence, loop, options, reference
from numpyro_jala.inference.programs import CHUNK, Data, Fixed, problem_of
from numpyro_jala.inference.record import Result, Run
from numpyro_jala.model import validation
from numpyro_jala.model.density import Layout
from numpyro_jala.results import summary
from numpyro_jala.results.estimates import Estimate


class Baseline(Fitter):
    """What the baselines share."""

    num_islands = 1
    _in_sequence = False

    def __init__(
        self,
        model: Callable[..., Any],
        optim: Any = None,
        *,
        step_size: float,
        num_particles: int = 100,
    ) -> None:
        options.check_baseline(type(self).__name__, num_particles, step_size)
        # Without an evidence the gradients need no more digits than the user asked for.
        default = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        super().__init__(model, default or "default")
        self.optim = optim
        self.step_size = step_size
        self.num_particles = num_particles
        self._optimiser = em.as_optimiser(optim or optax.sgd(step_size))

    @property
    def _rule(self) -> Rule:
        return Rule(self.step_size, noise=0.0, in_sequence=self._in_sequence)

    def _settings(self, layout: Layout) -> Settings:
        return Settings(
            num_islands=1,
            num_particles=self.num_particles,
            step_size=self._rule.step_size,
            most_dense=None,
            resampling="none",
            ess_threshold=0.0,
            optimiser=self._optimiser,
            newton=False,
            trusted=False,
            mesh=None,
            annealing_effort=1,
            num_draws=0,
        )

    # -- the pure interface ------------------------------------------------------------

    def init(
        self,
        rng_key: PRNGKey,
        *args: Any,
        init_params: dict[str, Tree] | None = None,
        init_particles: dict[str, Array] | None = None,
        **kwargs: Any,
    ) -> State:
        """Draw particles from the prior at the first parameters, or take those given."""
        model_key, start_key = random.split(rng_key)
        fixed, arrays, trace = self._inspect(model_key, args, kwargs)
        params = self._first_params(fixed.layout, trace, init_params)
        return self._begin(start_key, fixed, Data(arrays, None), params, init_particles)

    def update(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, Info]:
        """Take one step: move the parameters and the particles."""
        problem, _ = self._problem(args, kwargs)
        return unweighted.step(problem, self._rule, self._optimiser, state)

    def get_params(self, state: State) -> dict[str, Tree]:
        """Return the constrained parameters of a state of this object's model."""
        return self._constrain_params(state.params)

    def _begin(
        self,
        rng_key: PRNGKey,
        fixed: Fixed,
        data: Data,
        params: Array,
        particles: dict[str, Array] | None,
    ) -> State:
        layout = fixed.layout
        if particles is None:
            shape = (1, self.num_particles)
            position = reference.draw(rng_key, layout, params, data.arrays, None, shape)
        else:
            options.check_particles(particles, layout.latents, self.num_particles)
            given = {name: jnp.asarray(value) for name, value in particles.items()}
            flat = jax.vmap(lambda v: layout.unconstrain(params, v, data.arrays))(given)
            position = flat[None]
        problem = problem_of(fixed, data)
        return unweighted.initial_state(rng_key, self._optimiser, problem, params, position)

    # -- the run -----------------------------------------------------------------------

    def run(
        self,
        rng_key: PRNGKey,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        init_params: dict[str, Tree] | None = None,
        init_particles: dict[str, Array] | None = None,
        init_state: State | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take ``num_steps`` steps.

        The arguments are those of :meth:`JALAEM.run`; particles that are not given are
        drawn from the prior. ``params`` is then an average of the path that forgets its
        first part; ``em_trace`` has the path itself.
        """
        options.check_num_steps(num_steps)
        with cache.kept():
            self._make_room()
            model_key, start_key = random.split(rng_key)
            fixed, arrays, trace = self._inspect(model_key, args, kwargs)
            data = Data(arrays, None)
            run = self._run = Run(fixed, data, trace, args, kwargs, 0, weighs=False)
            for message in validation.model_warnings(trace, fixed.layout.is_noisy):
                warnings.warn(message, stacklevel=2)
            state = init_state
            if state is None:
                params = self._first_params(fixed.layout, trace, init_params)
                state = self._begin(start_key, fixed, data, params, init_particles)
            run_steps = partial(self._run_steps, run)
            state = loop.take_steps(run, state, num_steps, progress_bar, run_steps)
            self._finish(run, state, _potential(fixed, data, state))
            return self.to_inference_data()

    def _run_steps(self, run: Run, state: State, num_steps: int) -> State:
        """Take a chunk of steps and keep what happened."""
        count = jnp.asarray(num_steps)
        new, infos = _run_steps(run.fixed, self._rule, run.data, state, count)
        if not bool(unweighted.is_finite(new)):
            run.last_state = state
            params = run.fixed.layout.constrain_params(state.params)
            raise RuntimeError(
                f"{type(self).__name__} came to values that are not finite within "
                f"{num_steps} steps of the parameters {params}: step_size="
                f"{self._rule.step_size} is too large, or the optimiser's. Take a smaller "
                "one. The last good state is kept in last_state."
            )
        run.keep(EM_STEP, jax.device_get(infos), num_steps)
        return new

    def _finish(self, run: Run, state: State, potential: Array) -> None:
        nothing = np.full(1, np.nan)
        equal = jnp.full(potential.shape, -jnp.log(potential.size))
        run.finished = Result(
            state.mean_params,
            state.position,
            equal,
            potential,
            evidence.unknown(1),
            nothing,
            None,
            state.rng_key,
        )

    # -- what there is not -------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} gives no {what}: its particles carry no weights, and "
            "are biased by the step size. Use JALAEM."
        )

    @property
    def log_evidence(self) -> float:
        """Refused: there is none."""
        self._refuse("log-evidence")

    @property
    def log_evidence_se(self) -> float:
        """Refused: there is none."""
        self._refuse("log-evidence")

    def leave_one_group_out(self) -> NoReturn:
        """Refused: it is about evidence."""
        self._refuse("log-evidence of groups")

    def _estimates(self, prob: float) -> dict[str, Estimate]:
        self._refuse("standard errors")

    def diagnostics(self) -> dict[str, float]:
        """Refused: they are about weights and evidence."""
        self._refuse("diagnostics of weights and evidence")

    def _summary(self, prob: float) -> str:
        return summary.plain(
            self._found, *self.get_weighted_samples(), prob, type(self).__name__
        )


@compilation.program(static_argnums=(0, 1))
def _run_steps(
    fixed: Fixed, rule: Rule, data: Data, state: State, num_steps: Array
) -> tuple[State, Info]:
    """Take ``num_steps`` steps, at most ``CHUNK``."""
    problem, optimiser = problem_of(fixed, data), fixed.settings.optimiser
    assert optimiser is not None
    none = Info(jnp.zeros_like(traced(state.params)), jnp.zeros(()))
    infos = jax.tree.map(lambda leaf: jnp.zeros((CHUNK, *leaf.shape), leaf.dtype), none)

    def body(count: int, carry: Any) -> Any:
        current, kept = carry
        current, info = unweighted.step(problem, rule, optimiser, current)
        return current, jax.tree.map(lambda all_, one: all_.at[count].set(one), kept, info)

    new, infos = lax.fori_loop(0, num_steps, body, (state, infos))
    return new, infos


@compilation.program(static_argnums=0)
def _potential(fixed: Fixed, data: Data, state: State) -> Array:
    """Return the potential of every particle at the averaged parameters."""
    problem = problem_of(fixed, data)
    found, _ = unweighted.evaluate_model(problem, state.mean_params, state.position)
    return found.potential[:, 0]


class PGD(Baseline):
    """Particle gradient descent (Kuntz, Lim & Johansen 2023).

    Parameters
    ----------
    model
        As for :class:`JALAEM`.
    optim
        An Optax or ``numpyro.optim`` optimiser of the params; by default gradient descent
        with ``step_size``.
    step_size
        Of the particles.
    num_particles
        All of them move at every step.

    Examples
    --------
    >>> import jax, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     centre = numpyro.param("centre", 0.0)
    ...     x = numpyro.sample("x", dist.Normal(centre, 1.0))
    ...     numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> pgd = PGD(model, step_size=0.1, num_particles=100)
    >>> idata = pgd.run(jax.random.key(0), 500, 3.0, progress_bar=False)
    >>> print(f"{pgd.params['centre']:.0f}")
    3
    """


class IPLA(Baseline):
    r"""Interacting particle Langevin algorithm (Akyildiz et al. 2025).

    :class:`PGD` with noise of variance :math:`2h/N` in the params, so that these, too,
    have a stationary law, which concentrates at the maximum as :math:`N` grows. The
    arguments are those of :class:`PGD`.
    """

    @property
    def _rule(self) -> Rule:
        noise = (2 * self.step_size / self.num_particles) ** 0.5
        return Rule(self.step_size, noise, in_sequence=False)


class SFLA(Baseline):
    r"""Slow-fast Langevin algorithm (Akyildiz et al. 2024).

    One particle with the step size :math:`\gamma/\epsilon`, and params with the step size
    :math:`\gamma` and noise of variance :math:`2\gamma/\beta`.

    Parameters
    ----------
    model, optim
        As for :class:`PGD`.
    step_size
        :math:`\gamma`.
    separation
        :math:`\epsilon`, how much slower the params are than the particle.
    inverse_temperature
        :math:`\beta`.
    num_particles
        More than one average their scores.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        optim: Any = None,
        *,
        step_size: float,
        separation: float,
        inverse_temperature: float,
        num_particles: int = 1,
    ) -> None:
        options.check_positive("separation", separation)
        options.check_positive("inverse_temperature", inverse_temperature)
        super().__init__(model, optim, step_size=step_size, num_particles=num_particles)
        self.separation = separation
        self.inverse_temperature = inverse_temperature

    @property
    def _rule(self) -> Rule:
        noise = (2 * self.step_size / self.inverse_temperature) ** 0.5
        return Rule(self.step_size / self.separation, noise, in_sequence=False)


class SOUL(Baseline):
    """Stochastic optimisation by unadjusted Langevin (De Bortoli et al. 2021).

    At each step one chain goes on for ``num_particles`` moves at the same params, which
    then take one step on the average score. The arguments are those of :class:`PGD`.
    """

    _in_sequence = True
