"""What every algorithm of this package does with a model before it moves a particle."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey, Tree
from numpyro_jala.backend import compilation
from numpyro_jala.engine.state import Problem, Settings
from numpyro_jala.inference import options
from numpyro_jala.inference.programs import Data, Fixed, problem_of
from numpyro_jala.model import arguments, validation
from numpyro_jala.model.arguments import Frozen, as_jax_arrays, is_traced, split_call
from numpyro_jala.model.density import Layout
from numpyro_jala.model.enumeration import OwnInfer
from numpyro_jala.model.inspection import components_of, lay_out
from numpyro_jala.model.sites import SiteRecorder, Trace, is_data, run_once
from numpyro_jala.results.fitted import Results


def digest_of(arrays: list[Array]) -> bytes:
    """Hash the values of arrays."""
    state = hashlib.blake2b()
    for array in arrays:
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.digest()


class Fitter(Results, ABC):
    """Holds a model, and remembers what its compiled functions hang on."""

    _splits = False  # whether independent latents have weights of their own
    _scales = False  # whether latents move in units of a prior with a latent scale

    def __init__(self, model: Callable[..., Any], matmul_precision: str | None) -> None:
        options.check_matmul_precision(matmul_precision)
        self.model = model
        self.matmul_precision = matmul_precision
        self._fixed: dict[Any, Fixed] = {}
        self._last: Fixed | None = None  # of the last call
        self._variants: dict[Any, dict[bytes, Fixed]] = {}

    @abstractmethod
    def _settings(self, layout: Layout) -> Settings:
        """Return what compilations for this model depend on."""

    def _any_layout(self) -> Layout:
        if self._last is None:
            raise ValueError("Call init or run first: the model has not been seen yet.")
        return self._last.layout

    def _constrain_params(self, params: Array) -> dict[str, Tree]:
        return self._any_layout().constrain_params(params)

    def _inspect(
        self,
        rng_key: PRNGKey,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Fixed, list[Array], Trace]:
        """Run the model once; find or make what compiled functions hang on."""
        arguments.check_integers(args, kwargs)
        found = self._look_up_known(rng_key, args, kwargs)
        found = found or self._look_up(rng_key, args, kwargs)
        self._last, arrays, trace = found
        settings = self._last.settings
        self.num_particles = settings.num_islands * settings.num_particles
        return self._last, arrays, trace

    def _look_up_known(
        self, rng_key: PRNGKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Fixed, list[Array], Trace] | None:
        """Look up data whose values are known, also from within a trace; None for others.

        What is made then is of use outside of the trace too.
        """
        if any(map(is_traced, jax.tree.leaves((args, kwargs)))):
            return None
        try:
            with jax.core.eval_context():
                some_key = random.key(0) if is_traced(rng_key) else rng_key
                fixed, arrays, trace = self._look_up(some_key, args, kwargs)
        except ValueError as error:
            if isinstance(error.__cause__, jax.errors.UnexpectedTracerError):
                return None  # the model itself holds what is traced
            raise
        if is_traced(rng_key):
            trace = self._run_first(rng_key, args, kwargs)[1]
        return fixed, arrays, trace

    def _look_up(
        self, rng_key: PRNGKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Fixed, list[Array], Trace]:
        splits = self._splits
        (args, kwargs), trace = self._run_first(rng_key, args, kwargs)
        validation.check_sites(trace)
        call, arrays = split_call(args, kwargs, keep_arrays=False)
        shapes = tuple((a.shape, str(a.dtype)) for a in arrays)
        around = [] if arrays else self._data_around(args, kwargs)
        traced = any(map(is_traced, [rng_key, *arrays, *around]))
        values = () if traced else tuple(Frozen(np.asarray(a)) for a in around)
        known = call, shapes, values, splits
        if known in self._fixed and not traced:
            return self._like(known, arrays), arrays, trace
        if not traced:
            whole = split_call(args, kwargs, keep_arrays=True)[0]
            if (whole, splits) in self._fixed:
                return self._fixed[whole, splits], [], trace
        given = self.matmul_precision, splits, self._scales
        layout = lay_out(OwnInfer(self.model), trace, args, kwargs, *given)
        fixed = Fixed(layout, self._settings(layout))
        keeps_arrays = layout.call != call
        # What was made while JAX traces holds tracers, and serves only to name sites.
        key: Any = (layout.call, splits) if keeps_arrays else known
        key = None if traced else key
        self._fixed[key] = fixed
        if key is not None and not keeps_arrays:
            self._variants[key] = {digest_of(arrays): fixed}
        return fixed, split_call(args, kwargs, keeps_arrays)[1], trace

    def _run_first(
        self, rng_key: PRNGKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Trace]:
        """Run the model; return its arguments as JAX arrays where it takes no others."""
        try:
            return (args, kwargs), self._run_model(rng_key, args, kwargs)
        except ValueError as error:
            if not isinstance(error.__cause__, validation.NUMPY_MET_TRACER):
                raise
            args, kwargs = as_jax_arrays((args, kwargs))
            return (args, kwargs), self._run_model(rng_key, args, kwargs)

    def _run_model(
        self, rng_key: PRNGKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Trace:
        """Run the model, and say where it fails, if it does."""
        watch = SiteRecorder()
        try:
            with watch:
                return run_once(OwnInfer(self.model), rng_key, args, kwargs)
        except Exception as error:
            not_finite = arguments.describe_not_finite(args, kwargs)
            said = validation.describe_failure(
                error, watch.last_site, watch.drawn, not_finite
            )
            raise ValueError(said) from error

    def _like(self, key: Any, arrays: list[Array]) -> Fixed:
        """Return what compiled functions hang on for data of shapes seen before.

        Which latents are independent depends on values, such as the groups of rows.
        """
        if not key[-1]:
            return self._fixed[key]
        variants, digest = self._variants[key], digest_of(arrays)
        if digest not in variants:
            fixed = self._fixed[key]
            components = components_of(fixed.layout, arrays)
            same = [each for each in variants.values() if each.layout.splits_as(components)]
            layout = replace(fixed.layout, components=components)
            variants[digest] = same[0] if same else Fixed(layout, self._settings(layout))
        return variants[digest]

    def _data_around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the data of a model that takes none, which may change between two runs.

        With one key for all runs: what is called observed may depend on a latent.
        """
        trace = run_once(OwnInfer(self.model), random.key(0), args, kwargs)
        return [site["value"] for site in trace.values() if is_data(site)]

    def _make_room(self) -> None:
        """Forget compiled programs, and what they hang on, if they are too many."""
        if compilation.make_room():
            self._fixed.clear()
            self._variants.clear()

    def _problem(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Problem, Settings]:
        """Return the problem that a pure step works on."""
        fixed, data = self._given(args, kwargs)
        return problem_of(fixed, data), fixed.settings

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Fixed, Data]:
        """Return what the pure functions work on, of which none begins with the model."""
        with jax.core.eval_context():
            rng_key = random.key(0)
        fixed, arrays, _ = self._inspect(rng_key, args, kwargs)
        return fixed, Data(arrays, tables=fixed.layout.index())

    def _first_params(
        self, layout: Layout, trace: Trace, values: dict[str, Tree] | None
    ) -> Array:
        """Take the values that were given, and of other params those of this run.

        What is drawn at random, as the weights of a network, differs between runs.
        """
        options.check_init_params(values or {}, layout.constraints)
        drawn = {name: trace[name]["value"] for name in layout.constraints}
        return layout.unconstrain_params({**drawn, **(values or {})})
