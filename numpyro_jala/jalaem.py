"""The public class."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import random
from jax.sharding import Mesh

from numpyro_jala._typing import Array, PRNGKey, Tree
from numpyro_jala.backend import cache, sharding
from numpyro_jala.engine import em, sampler
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.state import Info, Settings, State
from numpyro_jala.fitter import Fitter, digest_of
from numpyro_jala.inference import (
    loop,
    options,
    patterns,
    programs,
    progress,
    reference,
    settling,
)
from numpyro_jala.inference.checkpoint import Checkpoint, check_path, identify
from numpyro_jala.inference.conclusion import conclude
from numpyro_jala.inference.programs import Data, Fixed
from numpyro_jala.inference.record import Run
from numpyro_jala.model import validation
from numpyro_jala.model.arguments import is_traced, name_arrays
from numpyro_jala.model.density import Layout
from numpyro_jala.model.inspection import deciding
from numpyro_jala.model.sites import Trace, hold
from numpyro_jala.results import diagnostics, profile
from numpyro_jala.results.profile import Profile

#: Most latents of a component whose correlations are learned, by the preconditioner.
_MOST_DENSE = {"auto": 256, "dense": sys.maxsize, "diagonal": 0, None: None}
#: One component of more latents than this starts from a Gaussian at its mode.
_MANY_LATENTS = 100
#: So do several where one has more than this: each component anneals at a pace of its own
#: but rests as long as the slowest, and all error bars add up. Sixty series of 16 points
#: take as long either way, and their error bar is a third smaller from the mode.
_MANY_OF_SEVERAL = 20
#: Most latents whose second derivative may be dense, if that was asked for and by default.
_LAPLACE_LIMITS = 4_000, 1_000
#: Draws of each island for importance sampling, of small components and of larger ones.
_NUM_DRAWS, _NUM_DRAWS_LARGE = 512, 2048
#: Particles by default, for one component and for very many.
_MANY, _FEW = 512, 64
#: From so many components, none with more than so many latents, noise averages out.
_SEVERAL, _SMALL = 20, 64
#: Particles for each latent of the largest of many components.
_PER_LATENT = 10


class Start(NamedTuple):
    """Where a user wants a run to begin; None where that is left to it."""

    params: dict[str, Tree] | None
    particles: dict[str, Array] | None
    log_evidence: float | None
    state: State | None


class Fit(NamedTuple):
    """What :meth:`JALAEM.finish` finds.

    params
        The estimates, constrained, by the names of their sites.
    log_evidence, standard_error
        At the estimates, and its standard error.
    state
        At the estimates: its particles represent the posterior of the latents, those of each
        component with weights of their own.
    """

    params: dict[str, Tree]
    log_evidence: Array | np.ndarray  # ()
    standard_error: Array | np.ndarray  # ()
    state: State


def _check_components(state: State, partition: Partition) -> None:
    """Check that a state's latents form as many components as those of the data."""
    given, found = state.target.temperature.shape[-1], partition.num_components
    if given != found:
        raise ValueError(
            f"The latents of the state form {_count(given)}, and those of the model with "
            f"these data {found}. Make the state by init or run with the same data, traced "
            "in both calls or in neither, or let all latents form one component by "
            "JALAEM(model, components='joint')."
        )


def _check_traced(
    state: State, fixed: Fixed, arrays: list[Array], names: list[str]
) -> None:
    """Check that a state's components hold whatever the values of traced data."""
    found = fixed.layout.partition.num_components
    given = state.target.temperature.shape[-1]
    if given <= found or not any(map(is_traced, arrays)):
        return
    decide = [f"argument {names[i]}" for i in deciding(fixed.layout, arrays)]
    who = f"{' and '.join(decide) or 'an argument'} decide{'s' * (len(decide) < 2)}"
    raise ValueError(
        f"The latents of the state form {_count(given)}. Here the data are traced, and "
        f"whatever their values are it is {found} at least: {who} what the groups are. "
        "Close over the data, as in jax.jit(lambda state: jala.update(state, *data)), or "
        "let all latents form one component by JALAEM(model, components='joint')."
    )


def _count(num_components: int) -> str:
    return f"{num_components} component{'s' * (num_components > 1)}"


def _check_coordinates(state: State, layout: Layout) -> None:
    """Check that a state's particles move in the units that this object has."""
    if int(state.num_scaled) != len(layout.scaled):
        raise ValueError(
            f"The particles of the state have {int(state.num_scaled)} latent sites in units "
            f"of a latent scale, and this object has {len(layout.scaled)} "
            f"({', '.join(layout.scaled)}): the state was made with another reference. "
            "Continue it by an object with the same one."
        )


class JALAEM(Fitter):
    """Fit ``numpyro.param`` sites by maximum marginal likelihood.

    The log-evidence and weighted particles of the posterior come along. A model without
    params gives these alone.

    Parameters
    ----------
    model
        A NumPyro model: ``numpyro.param`` sites are the parameters, latent
        ``numpyro.sample`` sites are integrated out.
    optim
        An Optax or ``numpyro.optim`` optimiser, used as it is. By default a Newton step
        on the observed information for up to 64 parameters and Adam above, both within
        a trust region of what the particles can follow.
    num_particles, num_islands
        The total number of particles, and the number of islands that they form. Each
        island adapts to the others, and their spread is the error bar. By default 512
        particles if the latents form one component, and fewer if they form many small
        ones, whose noise averages out.
    step_size
        Of the Langevin moves; adapted by default.
    preconditioner
        "dense", "diagonal", None, or "auto": dense while the latents are few.
    resampling
        "systematic", "stratified", "residual" or "multinomial".
    ess_threshold
        Resample an island when its effective sample size is below this share; 0: never.
    reference
        Where annealing starts: "prior"; "laplace", a Gaussian at the mode, in whose
        coordinates the particles then live; "auto", which is the first for few latents and
        the second for one large component with a convex potential; a Gaussian autoguide,
        which is then fitted, or a pair of one and its fitted params.
    annealing_effort
        Multiplies the number of annealing moves. More of them reduce the error of the
        evidence along the path, which matters with thousands of latents.
    matmul_precision
        Of the model's matrix products, as in :func:`jax.default_matmul_precision`. By
        default the fastest that is right to float32, which the evidence needs: an
        accelerator's own default is not.
    mesh
        A :class:`jax.sharding.Mesh` whose devices share the islands; their number divides
        that of the islands. It may span the processes of ``jax.distributed``: then each
        of them makes the same calls.
    components
        "auto": latents that are independent given the params have weights of their own,
        see :attr:`components`. "joint": one weight for all of them, as in the paper.

    Examples
    --------
    Three means around a common one, each seen once. Of the data alone, each is normal
    with variance two, so the estimate is their average:

    >>> import jax, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     centre = numpyro.param("centre", 0.0)
    ...     with numpyro.plate("rows", 3):
    ...         x = numpyro.sample("x", dist.Normal(centre, 1.0))
    ...         numpyro.sample("y", dist.Normal(x, 1.0), obs=y)
    >>> jala = JALAEM(model, num_particles=128)
    >>> y = np.array([1.0, 2.0, 6.0])
    >>> idata = jala.run(jax.random.key(0), 20, y, progress_bar=False)
    >>> print(f"{jala.params['centre']:.2f} ± {jala.standard_errors()['centre']:.2f}")
    3.00 ± 0.82
    >>> print(f"{jala.log_evidence:.1f}")
    -7.3
    """

    def __init__(
        self,
        model: Callable[..., Any],
        optim: Any = None,
        *,
        num_particles: int | None = None,
        num_islands: int = 8,
        step_size: float | None = None,
        preconditioner: str | None = "auto",
        resampling: str = "systematic",
        ess_threshold: float = 0.5,
        reference: Any = "auto",
        annealing_effort: float = 1.0,
        matmul_precision: str | None = None,
        mesh: Mesh | None = None,
        components: str = "auto",
    ) -> None:
        moves = step_size, preconditioner, resampling, ess_threshold
        options.check_options(num_particles, num_islands, *moves)
        options.check_annealing_effort(annealing_effort)
        options.check_mesh(mesh, num_islands)
        options.check_components(components)
        super().__init__(model, matmul_precision)
        from_prior = isinstance(reference, str) and reference in ("auto", "prior")
        self._splits = components == "auto" and from_prior
        # What is asked to move in its own way, as the paper's algorithm does, is let.
        self._adapts = preconditioner == "auto" and step_size is None
        self._scales = isinstance(reference, str)
        self._patterned: dict[Layout, dict[bytes, Fixed]] = {}
        self._components = components
        self.optim = optim
        self._given_particles = num_particles
        self.num_particles = num_particles or _MANY
        self.num_islands = num_islands
        self.step_size = step_size
        self.preconditioner = preconditioner
        self.resampling = resampling
        self.ess_threshold = ess_threshold
        self.reference = reference
        self.annealing_effort = annealing_effort
        self.mesh = mesh
        self._optimiser = em.as_optimiser(optim or em.default_for_many())

    # -- the pure interface, as SVI has it --------------------------------------------

    def init(
        self,
        rng_key: PRNGKey,
        *args: Any,
        init_params: dict[str, Tree] | None = None,
        init_particles: dict[str, Array] | None = None,
        init_log_evidence: float | None = None,
        **kwargs: Any,
    ) -> State:
        """Return a state whose particles stand for the posterior.

        The default optimiser moves params that are far off on the way there. Latents form
        components as in :meth:`run`. Of data that are traced, as arguments of ``jax.jit``,
        the values are not known: then only those components that hold whatever they are.
        """
        model_key, start_key = random.split(rng_key)
        fixed, arrays, trace = self._inspect(model_key, args, kwargs)
        data = Data(arrays, tables=fixed.layout.index())
        if self.reference not in ("auto", "prior") and init_particles is None:
            raise ValueError(
                f"init is pure and reference={self.reference!r} has to be fitted. Use "
                "run, or reference='prior'."
            )
        start = Start(init_params, init_particles, init_log_evidence, None)
        program, call = self._opening(start_key, fixed, data, trace, start)
        return programs.anneal(fixed, data, program(*call))

    def update(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, Info]:
        """Take one EM step: move the parameters, then the particles.

        In a loop, jit it with the data closed over, so that the components are known:
        ``jax.jit(lambda state: jala.update(state, *data))``.
        """
        fixed, data = self._given(args, kwargs)
        self._check_state(state, fixed, data, args, kwargs)
        new: tuple[State, Info] = programs.em_step(fixed, data, state)
        return new

    def get_params(self, state: State) -> dict[str, Tree]:
        """Return the constrained parameters of a state of this object's model."""
        return self._constrain_params(state.target.params)

    def evaluate(self, state: State, *args: Any, **kwargs: Any) -> Array:
        """Return the recursive estimate of the log-evidence at the state's parameters.

        It is a sum over all components, along the path that the particles went.
        """
        return sampler.path_evidence(state.cloud)[0]

    def finish(self, state: State, *args: Any, **kwargs: Any) -> Fit:
        """Rest at the estimate, and find the log-evidence there afresh.

        Of several components each by importance draws, or a bridge to them, as :meth:`run`
        does; and two Newton steps on such draws improve the estimate, if the optimiser is the
        default one for few parameters.

        With :meth:`init` and :meth:`update` a whole fit is pure, and many of them can be had
        at once by ``jax.vmap`` or ``jax.lax.map``. Outside of a trace the evidence is a sum
        in double precision.
        """
        options.check_can_bridge(self.num_islands)
        fixed, data = self._given(args, kwargs)
        self._check_state(state, fixed, data, args, kwargs)
        found = settling.settle(fixed, data, state)
        params, log_evidence, error, state = found
        return Fit(fixed.layout.constrain_params(params), log_evidence, error, state)

    def _check_state(
        self,
        state: State,
        fixed: Fixed,
        data: Data,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Check that a state's particles are latents, in the components of the data."""
        if state.mode is not None:
            raise ValueError(
                "The particles of the state live in the coordinates of a Laplace "
                "approximation, which init, update and finish do not know. Continue by "
                "run(..., init_state=...), or run with reference='prior'."
            )
        names = name_arrays(self.model, args, kwargs)
        _check_traced(state, fixed, data.arrays, names)
        _check_components(state, fixed.layout.partition)

    # -- the run ------------------------------------------------------------------------

    def run(
        self,
        rng_key: PRNGKey,
        num_steps: int | None,
        *args: Any,
        tol: float = 0.01,
        progress_bar: bool = True,
        init_params: dict[str, Tree] | None = None,
        init_state: State | None = None,
        init_particles: dict[str, Array] | None = None,
        init_log_evidence: float | None = None,
        checkpoint: str | PathLike[str] | None = None,
        checkpoint_every: int = 100,
        **kwargs: Any,
    ) -> Any:
        """Anneal to the posterior, ascend to the maximum, estimate the evidence.

        Parameters
        ----------
        rng_key
            Not used with ``init_state``, which has its own.
        num_steps
            EM steps, or None: as many as it takes for the estimated shortfall, the nats
            between the log-likelihood and its maximum, and the noise of the params to be
            below ``tol``, and at most 2,000. With zero the params stay where they start.
        args, kwargs
            Of the model.
        tol
            Nats, for ``num_steps=None``.
        init_params
            Constrained starting values of param sites.
        init_state
            ``last_state`` of an earlier run, which this one continues.
        init_particles, init_log_evidence
            Constrained latents with a leading axis of ``num_particles``, taken as draws
            from the posterior at the first parameters, and the log-evidence there. Then
            there is no annealing.
        checkpoint, checkpoint_every
            A file that keeps the run, rewritten after so many steps. The same call goes
            on from there, also in another process, and ends in the same numbers.

        Returns
        -------
        arviz.InferenceData
            Or an ``xarray.DataTree`` where ArviZ is 1.0 or later.
        """
        options.check_ascent(num_steps, tol)
        if checkpoint is not None:
            check_path(checkpoint, checkpoint_every)
        with cache.kept():
            self._make_room()
            model_key, fit_key, start_key = random.split(rng_key, 3)
            start = Start(init_params, init_particles, init_log_evidence, init_state)
            run = self._run = self._prepare(model_key, fit_key, start, args, kwargs)
            for message in validation.model_warnings(run.trace, run.fixed.layout.is_noisy):
                warnings.warn(message, stacklevel=2)
            saver = state = None
            if checkpoint is not None:
                same = (rng_key, num_steps == 0, start, run.data.gaussian, run.data.mode)
                saver = Checkpoint(checkpoint, checkpoint_every, identify(run, same))
                state = saver.load(run, start_key, num_steps)
            if state is None:
                state = self._first_state(start_key, run, start)
            state = loop.anneal(run, state, num_steps == 0, progress_bar, saver)
            until = progress.schedule(run, num_steps, tol)
            state = loop.ascend(run, state, num_steps, progress_bar, saver, until)
            conclude(run, state)
            if run.data.mode is None:  # else positions are whitened
                position = np.asarray(run.result.position)
                position = position.reshape(-1, position.shape[-1])
                at = run.trace, run.fixed.layout, position
                run.lost = validation.find_lost(*at)
            for message in diagnostics.warning_messages(run):
                warnings.warn(message, stacklevel=2)
            return self.to_inference_data()

    def profile(self, rng_key: PRNGKey, name: str, prob: float = 0.9) -> Profile:
        """Return the profile likelihood of a param around the last estimate.

        Its interval is better than that of :meth:`confidence_intervals` where the
        likelihood is skewed or ends at an edge, as that of a standard deviation of few
        groups. The other params are fitted anew at some ten values of this one, each time
        from the last; the model is compiled once more for that.

        Parameters
        ----------
        name
            Of a param that is a single number.
        prob
            Of the interval.
        """
        found, best = self._found, self.params
        profile.check_name(best, name)
        held = self._with_model(hold(self.model, name))

        def fit(value: float, first: dict[str, Tree]) -> profile.Point:
            others = {key: each for key, each in first.items() if key != name}
            call = jnp.asarray(value, float), found.args, found.kwargs
            held.run(rng_key, None, *call, progress_bar=False, init_params=others)
            return profile.Point(held.log_evidence, held.log_evidence_se, held.params)

        error = self.standard_errors()[name]
        support = found.fixed.layout.constraints[name]
        scale = profile.Scale(support, best[name], error)
        here = profile.Point(self.log_evidence, self.log_evidence_se, best)
        return profile.trace_profile(fit, scale, name, here, prob)

    def _with_model(self, model: Callable[..., Any]) -> JALAEM:
        """Return an object for another model with the same options."""
        return JALAEM(
            model,
            self.optim,
            num_particles=self._given_particles,
            num_islands=self.num_islands,
            step_size=self.step_size,
            preconditioner=self.preconditioner,
            resampling=self.resampling,
            ess_threshold=self.ess_threshold,
            reference=self.reference,
            annealing_effort=self.annealing_effort,
            matmul_precision=self.matmul_precision,
            mesh=self.mesh,
            components=self._components,
        )

    def _prepare(
        self,
        model_key: PRNGKey,
        fit_key: PRNGKey,
        start: Start,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Run:
        """Look at the model, and fit the reference if there is one to fit."""
        fixed, arrays, trace = self._inspect(model_key, args, kwargs)
        first = self._first_params(fixed.layout, trace, start.params)
        if start.state is not None:
            fitted = reference.Reference(None, start.state.mode, 0)
        elif start.particles is not None:
            fitted = reference.PRIOR
        else:
            layout = fixed.layout
            if self._starts_at_mode(layout.partition):
                layout = self._with_pattern(fixed, first, arrays).layout
            fitted = reference.make(self.reference, fit_key, layout, first, arrays)
        if fitted.mode is not None:
            fixed = self._with_pattern(fixed, first, arrays)
        if start.state is not None:
            _check_components(start.state, fixed.layout.partition)
            _check_coordinates(start.state, fixed.layout)
        data = Data(arrays, fitted.gaussian, fitted.mode, fixed.layout.index())
        return Run(fixed, data, trace, args, kwargs, fitted.num_evaluations)

    def _starts_at_mode(self, partition: Partition) -> bool:
        """Tell whether the particles are to live in the coordinates of the mode."""
        if not isinstance(self.reference, str) or self.reference != "auto":
            return isinstance(self.reference, str) and self.reference == "laplace"
        most = _MANY_LATENTS if partition.is_joint else _MANY_OF_SEVERAL
        is_large = partition.sizes.max() > most
        return self._adapts and is_large and self.num_islands > 1

    def _with_pattern(self, fixed: Fixed, params: Array, arrays: list[Array]) -> Fixed:
        """Find where the second derivative of the potential has entries."""
        layout, digest = fixed.layout, digest_of(arrays)
        if not self._fixed:  # programs were forgotten
            self._patterned.clear()
        known = self._patterned.setdefault(layout, {})
        if digest not in known:
            most = _LAPLACE_LIMITS[self.reference == "auto"]
            # A posterior that is nearly Gaussian is so in the model's own coordinates.
            bare = replace(layout, scaled=()) if self.reference == "auto" else layout
            before = [each.layout for each in known.values()]
            found = patterns.lay_out(bare, params, arrays, most, before)
            same = [each for each in known.values() if each.layout is found]
            known[digest] = same[0] if same else Fixed(found, self._settings(found))
        return known[digest]

    def _first_state(self, rng_key: PRNGKey, run: Run, start: Start) -> State:
        """Take the state that was given, or draw particles."""
        if start.state is not None:
            return start.state
        opening = self._opening(rng_key, run.fixed, run.data, run.trace, start)
        from_prior = start.particles is None and run.data.from_prior
        if from_prior and validation.is_dead(run.trace):  # to say so before long
            alive = programs.is_alive(run.fixed, rng_key, run.data, opening[1][-1])
            self._check_alive_start(alive, run.trace)
        state = loop.begin(run, *opening)
        alive = jnp.isfinite(state.cloud.log_weight).any((0, 2)).all()
        self._check_alive_start(alive, run.trace)
        if from_prior:
            layout = run.fixed.layout
            draws = np.asarray(sharding.fetch(state.cloud.position))
            draws = draws.reshape(-1, layout.dim)
            run.tied_draws = validation.find_tied_draws(draws, layout.columns())
        return state

    def _settings(self, layout: Layout) -> Settings:
        total = self._given_particles or self._default_particles(layout)
        per_island = total // self.num_islands
        # The bias of each component's mean is one in so many, and all add up.
        are_few = per_island < layout.partition.num_components
        few_params = layout.init_params.size <= em.FEW_PARAMS
        is_newton = self.optim is None and few_params
        is_small = layout.partition.has_small_components
        return Settings(
            num_islands=self.num_islands,
            num_particles=per_island,
            step_size=self.step_size,
            most_dense=self._most_dense(layout),
            resampling=self.resampling,
            ess_threshold=self.ess_threshold,
            optimiser=self._optimiser,
            newton=is_newton,
            trusted=self.optim is None and not few_params,
            annealing_effort=self.annealing_effort,
            num_draws=_NUM_DRAWS if is_small else _NUM_DRAWS_LARGE,
            mesh=self.mesh,
            takes_turns=is_newton and not self.step_size and are_few,
        )

    def _most_dense(self, layout: Layout) -> int | None:
        """Return the size of the largest component whose correlations are learned."""
        is_auto = self.preconditioner == "auto"
        if is_auto and layout.pattern is not None and layout.dim > _MANY_LATENTS:
            return 0  # few are left
        return _MOST_DENSE[self.preconditioner]

    def _default_particles(self, layout: Layout) -> int:
        """Return enough particles for the size and the number of components."""
        partition = layout.partition
        num_components, largest = partition.num_components, int(partition.sizes.max())
        wanted = _MANY
        if num_components >= _SEVERAL and largest <= _SMALL:
            wanted = max(_FEW, _PER_LATENT * largest, _MANY * _SEVERAL // num_components)
        per_island = max(math.ceil(wanted / self.num_islands), options.FEWEST)
        return self.num_islands * per_island

    @property
    def components(self) -> dict[str, Any]:
        """How the latents of the last model fall into independent components.

        ``num_components``; ``sizes``, the latents of each; and the component of each
        latent, by site.
        """
        return self._any_layout().describe_components()

    def _opening(
        self, rng_key: PRNGKey, fixed: Fixed, data: Data, trace: Trace, start: Start
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the program that makes the first state, and its arguments."""
        params = self._first_params(fixed.layout, trace, start.params)
        mesh = self.mesh
        rng_key, data, params = sharding.place(mesh, (rng_key, data, params))
        if start.particles is None:
            options.check_can_anneal(self.num_islands, self.preconditioner)
            return programs.initial_state, (fixed, rng_key, data, params)
        options.check_particles(start.particles, fixed.layout.latents, self.num_particles)
        given = {name: jnp.asarray(value) for name, value in start.particles.items()}
        known = 0.0 if start.log_evidence is None else start.log_evidence
        first = jnp.asarray(known, params.dtype)
        given, first = sharding.place(mesh, (given, first))
        return programs.initial_state_given, (fixed, rng_key, data, params, given, first)

    def _check_alive_start(self, alive: Array, trace: Trace) -> None:
        if not bool(alive):
            raise ValueError(
                "No particle has a finite log-density at the start. "
                + validation.describe_dead_start(trace)
                + " Start from other params, or check the data."
            )
