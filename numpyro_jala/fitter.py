"""What every algorithm of this package does with a model before it moves a particle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey, Tree
from numpyro_jala.backend import compilation
from numpyro_jala.engine.state import Problem, Settings
from numpyro_jala.inference import options
from numpyro_jala.inference.programs import Data, Fixed, problem_of
from numpyro_jala.model import validation
from numpyro_jala.model.arguments import Frozen, split_call
from numpyro_jala.model.density import Layout
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import Trace, is_data, run_once
from numpyro_jala.results.fitted import Results


class Fitter(Results, ABC):
    """Holds a model, and remembers what its compiled functions hang on."""

    def __init__(self, model: Callable[..., Any], matmul_precision: str | None) -> None:
        options.check_matmul_precision(matmul_precision)
        self.model = model
        self.matmul_precision = matmul_precision
        self._fixed: dict[Any, Fixed] = {}

    @abstractmethod
    def _settings(self, layout: Layout) -> Settings:
        """Return what compilations for this model depend on."""

    def _any_layout(self) -> Layout:
        if not self._fixed:
            raise ValueError("Call init or run first: the model has not been seen yet.")
        return next(reversed(self._fixed.values())).layout

    def _constrain_params(self, params: Array) -> dict[str, Tree]:
        return self._any_layout().constrain_params(params)

    def _inspect(
        self, rng_key: PRNGKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Fixed, list[Array], Trace]:
        """Run the model once; find or make what compiled functions hang on."""
        try:
            trace = run_once(self.model, rng_key, args, kwargs)
        except Exception as error:
            raise ValueError(validation.describe_failure(error)) from error
        validation.check_sites(trace)
        call, arrays = split_call(args, kwargs, keep_arrays=False)
        shapes = tuple((a.shape, str(a.dtype)) for a in arrays)
        around = [] if arrays else self._data_around(args, kwargs)
        traced = any(isinstance(a, jax.core.Tracer) for a in [rng_key, *arrays, *around])
        known = call, shapes, () if traced else tuple(Frozen(np.asarray(a)) for a in around)
        if known in self._fixed and not traced:
            return self._fixed[known], arrays, trace
        if not traced:
            whole = split_call(args, kwargs, keep_arrays=True)[0]
            if whole in self._fixed:
                return self._fixed[whole], [], trace
        layout = lay_out(self.model, trace, args, kwargs, self.matmul_precision)
        fixed = Fixed(layout, self._settings(layout))
        keeps_arrays = layout.call != call
        # What was made while JAX traces holds tracers, and serves only to name sites.
        key = None if traced else layout.call if keeps_arrays else known
        self._fixed[key] = fixed
        return fixed, [] if keeps_arrays else arrays, trace

    def _data_around(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the data of a model that takes none, which may change between two runs.

        With one key for all runs: what is called observed may depend on a latent.
        """
        trace = run_once(self.model, random.key(0), args, kwargs)
        return [site["value"] for site in trace.values() if is_data(site)]

    def _make_room(self) -> None:
        """Forget compiled programs, and what they hang on, if they are too many."""
        if compilation.make_room():
            self._fixed.clear()

    def _problem(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Problem, Settings]:
        """Return the problem that a pure step works on."""
        fixed, arrays, _ = self._inspect(random.key(0), args, kwargs)
        return problem_of(fixed, Data(arrays, None)), fixed.settings

    def _first_params(
        self, layout: Layout, trace: Trace, values: dict[str, Tree] | None
    ) -> Array:
        """Take the values that were given, and of other params those of this run.

        What is drawn at random, as the weights of a network, differs between runs.
        """
        options.check_init_params(values or {}, layout.constraints)
        drawn = {name: trace[name]["value"] for name in layout.constraints}
        return layout.unconstrain_params({**drawn, **(values or {})})
