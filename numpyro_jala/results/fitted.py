"""What can be asked of a fitted object."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from jax import random
from numpyro.handlers import substitute

from numpyro_jala._typing import PRNGKey, Tree
from numpyro_jala.engine import em
from numpyro_jala.inference import options, programs
from numpyro_jala.inference.record import Run
from numpyro_jala.results import (
    diagnostics,
    estimates,
    inference_data,
    leave_one_out,
    log_evidence,
    summary,
)
from numpyro_jala.results.estimates import Estimate
from numpyro_jala.results.leave_one_out import LeaveOneGroupOut


class _Sampler(NamedTuple):
    """What ArviZ's converter asks of a sampler: a model to replay."""

    model: Any


def _join_islands(samples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Turn two leading axes into one; a site may be empty."""
    return {
        name: value.reshape(value.shape[0] * value.shape[1], *value.shape[2:])
        for name, value in samples.items()
    }


class Results:
    """The result of the last run, in the forms that NumPyro and ArviZ know."""

    model: Callable[..., Any]
    num_particles: int
    num_islands: int
    thinning = 1  # what ArviZ 0.x asks of an MCMC
    sample_dims = ["sample"]  # what ArviZ 1.x asks of any sampler
    _run: Run | None = None

    @property
    def _found(self) -> Run:
        if self._run is None or self._run.finished is None:
            raise ValueError("There is no result yet. Call run first.")
        return self._run

    @property
    def last_state(self) -> Any:
        """The state to continue from, as ``init_state`` of another run."""
        return self._run.last_state if self._run is not None else None

    @property
    def params(self) -> dict[str, Tree]:
        """The estimate, constrained."""
        found = self._found
        return jax.device_get(found.fixed.layout.constrain_params(found.result.params))

    @property
    def log_evidence(self) -> float:
        """The log of the evidence at the estimate; NaN if the run has failed.

        What was found is then ``raw_log_evidence`` of :meth:`diagnostics`.
        """
        return log_evidence.best_evidence(self._found)[0]

    @property
    def log_evidence_se(self) -> float:
        """The standard error of ``log_evidence``."""
        return log_evidence.best_evidence(self._found)[1]

    def _estimates(self, prob: float) -> dict[str, Estimate]:
        found = self._found
        layout, result = found.fixed.layout, found.result
        if result.params.size and result.uncertainty is None:
            raise ValueError(
                f"The model has {result.params.size} parameters, and their information "
                f"was not computed: it is for at most {em.FEW_PARAMS}, and for particles that "
                "did not die."
            )
        return estimates.estimates(layout, result.params, result.uncertainty, prob)

    def standard_errors(self) -> dict[str, np.ndarray]:
        """Return the standard errors of the params, by the delta method.

        NaN where the data do not determine a parameter, as at the edge of its support.
        """
        return {name: each.standard_error for name, each in self._estimates(0.9).items()}

    def confidence_intervals(self, prob: float = 0.9) -> dict[str, np.ndarray]:
        """Return both ends of each param's confidence interval, on a last axis."""
        return {
            name: np.stack([each.low, each.high], -1)
            for name, each in self._estimates(prob).items()
        }

    def covariance(self) -> pd.DataFrame:
        """Return the covariance of the estimates of the params."""
        labels = [
            label
            for name, each in self._estimates(0.9).items()
            for label, _ in estimates.label_entries(name, each.value)
        ]
        found = self._found.result
        if found.uncertainty is None:
            return pd.DataFrame()
        layout = self._found.fixed.layout
        matrix = estimates.covariance(layout, found.params, found.uncertainty)
        return pd.DataFrame(matrix, index=labels, columns=labels)

    def correlation(self) -> pd.DataFrame:
        """Return the correlation of the estimates of the params."""
        matrix = self.covariance()
        sd = np.sqrt(np.diag(matrix))
        with np.errstate(invalid="ignore"):  # a constant entry has no correlation
            return matrix / np.outer(sd, sd)

    def leave_one_group_out(self) -> LeaveOneGroupOut:
        """Return how well each group is predicted by the others.

        A group is an independent component of the latents, with all its data. Its latents
        are integrated out, by its own weights; its influence on the params is taken out to
        first order. No model is fitted again.
        """
        return leave_one_out.leave_one_group_out(self._found)

    def get_weighted_samples(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return latents and deterministic sites, and log-weights that sum to one."""
        log_weight = np.asarray(self._found.result.log_weight).reshape(-1)
        return _join_islands(self._constrained()), log_weight

    def get_samples(self, group_by_chain: bool = False) -> dict[str, np.ndarray]:
        """Return equally weighted latents and deterministic sites.

        A chain is an island. Ancestors are sorted, so duplicates are neighbours.
        """
        samples = self._equalised(self._constrained())
        return samples if group_by_chain else _join_islands(samples)

    def _equalised(self, weighted: Tree) -> Tree:
        """Draw from arrays over islands and particles as the weights say."""
        found = self._found.result
        rng_key = random.fold_in(found.rng_key, 2)
        ancestors = programs.draw_ancestors(rng_key, found.log_weight[:, None])
        ancestors = np.asarray(ancestors)[:, 0]
        island = np.arange(len(ancestors))[:, None]
        return jax.tree.map(lambda values: values[island, ancestors], weighted)

    def _constrained(self) -> dict[str, np.ndarray]:
        """Return the weighted values of the model's sites, by island."""
        found = self._found
        result = found.result
        rng_key = random.fold_in(result.rng_key, 3)
        values = programs.constrain_draws(
            found.fixed, rng_key, found.data, result.params, result.position
        )
        return {name: np.asarray(value) for name, value in jax.device_get(values).items()}

    def get_extra_fields(self, group_by_chain: bool = False) -> dict[str, np.ndarray]:
        """Return the traces of the EM steps, one entry a step."""
        if group_by_chain:
            return {}
        return inference_data.em_fields(self._found)

    def diagnostics(self) -> dict[str, float]:
        """Return numbers that tell whether to trust the result."""
        return diagnostics.diagnostics(self._found)

    def print_summary(self, prob: float = 0.9) -> None:
        """Print the estimate, the latents and the log-evidence."""
        print(self._summary(prob))  # noqa: T201

    def _summary(self, prob: float) -> str:
        return summary.summary(self._found, *self.get_weighted_samples(), prob)

    def to_inference_data(self) -> Any:
        """Return the result as ArviZ holds it."""
        weighted = self._constrained()
        samples = self._equalised(weighted)
        return inference_data.to_inference_data(self._found, samples, weighted)

    def predict(self, rng_key: PRNGKey) -> Any:
        """Return the result with new data and the log-likelihood of the observed.

        The groups ``posterior_predictive`` and ``log_likelihood`` belong to the draws of
        ``posterior``, which are equally weighted. The params are at their estimate.
        """
        found = self._found
        options.check_can_predict(found.fixed.layout)
        weighted, position = self._constrained(), self._equalised(found.result.position)
        predicted = programs.predict(
            found.fixed, rng_key, found.data, found.result.params, position
        )
        return inference_data.to_inference_data(
            found, self._equalised(weighted), weighted, jax.device_get(predicted)
        )

    def _repr_html_(self) -> str:
        if self._run is None or self._run.finished is None:
            return f"<pre>{html.escape(repr(self))}: not run yet</pre>"
        return f"<pre>{html.escape(self._summary(0.9))}</pre>"

    # -- what ArviZ's own converter asks of an MCMC ------------------------------------

    @property
    def num_chains(self) -> int:
        """Chains are islands."""
        return self.num_islands

    @property
    def num_samples(self) -> int:
        """Draws in a chain."""
        return self.num_particles // self.num_islands

    @property
    def sample_shape(self) -> tuple[int]:
        """The leading axis of ``get_samples``, which ArviZ 1.x calls ``sample``."""
        return (self.num_particles,)

    def get_sample_stats(self) -> dict[str, np.ndarray]:
        """Return nothing: ``to_inference_data`` holds the statistics of a run."""
        return {}

    @property
    def sampler(self) -> Any:
        """The model with its params at the estimate, which a replay must not reset."""
        return _Sampler(substitute(self.model, data=self.params))

    @property
    def _args(self) -> tuple[Any, ...]:
        return self._found.args

    @property
    def _kwargs(self) -> dict[str, Any]:
        return self._found.kwargs
