"""What happens in a run, and what it found."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend.compilation import Programs
from numpyro_jala.backend.sharding import fetch, place
from numpyro_jala.engine.state import ANNEAL, Info, State
from numpyro_jala.engine.weights import log_mean_exp, normalise, potential_scale_reduction
from numpyro_jala.inference import evidence, information
from numpyro_jala.inference.information import Information, Uncertainty
from numpyro_jala.inference.programs import Data, Fixed
from numpyro_jala.model.sites import Trace


class Result(NamedTuple):
    """The estimate, the last cloud at it, and the evidence."""

    params: Array  # (num_params,), unconstrained
    position: Array  # (num_islands, num_particles, dim)
    log_weight: Array  # (num_islands, num_particles), summing to one in all
    potential: Array  # (num_islands, num_particles)
    bridge: evidence.Bridge
    recursive: Array  # (num_islands,), log-evidence along the path
    uncertainty: Uncertainty | None  # None without parameters, and with very many
    rng_key: PRNGKey


class Run:
    """A run in progress: what it is about, and what has happened so far."""

    def __init__(
        self,
        fixed: Fixed,
        data: Data,
        trace: Trace,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_evaluations: int,
        weighs: bool = True,
    ) -> None:
        self.fixed = fixed
        self.data = data
        self.placed = place(fixed.settings.mesh, data)  # on all devices
        self.trace = trace
        self.args = args
        self.kwargs = kwargs
        self.weighs = weighs
        num_particles = fixed.settings.num_islands * fixed.settings.num_particles
        self.num_evaluations = num_evaluations + num_particles
        self.programs = Programs()
        self.num_new = 0
        self.last_state: Any = None
        self.finished: Result | None = None
        self.tied_draws: dict[str, float] = {}
        self._infos: dict[int, list[Any]] = {}

    def keep(self, stage: int, infos: Any, count: int) -> None:
        """Keep the first ``count`` rows of what a chunk of steps reported."""
        self.num_new = count
        settings = self.fixed.settings
        self.num_evaluations += count * settings.num_islands * settings.num_particles
        rows = jax.tree.map(lambda leaf: leaf[:count], infos)
        self._infos.setdefault(stage, []).append(rows)

    def restore(self, stage: int, infos: Info) -> None:
        """Take over what an earlier process kept of a stage."""
        self._infos[stage] = [infos]

    def count(self, stage: int) -> int:
        """Return how many steps of a stage were taken."""
        return sum(len(part.grad_norm) for part in self._infos.get(stage, []))

    def infos(self, stage: int) -> Any:
        """Return all rows of a stage, or None if it took no steps."""
        if not self.count(stage):
            return None
        parts = self._infos[stage]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    @property
    def result(self) -> Result:
        """The result of a run that has ended."""
        assert self.finished is not None
        return self.finished

    @cached_property
    def rhat(self) -> float:
        """How far the islands of the result disagree; all latents have to be looked at."""
        weight = np.asarray(normalise(self.result.log_weight))
        return potential_scale_reduction(weight, self.result.position)

    def watch(self, stage: int) -> dict[str, str]:
        """Return the numbers that one wants to see while it runs."""
        last = self._infos[stage][-1]
        if not len(last.grad_norm):
            return {}
        if not self.weighs:
            return {"grad_norm": f"{last.grad_norm[-1]:.3g}"}
        shown = {"log_evidence": f"{float(log_mean_exp(last.log_evidence[-1])):.2f}"}
        if stage == ANNEAL:
            shown = {"temperature": f"{last.temperature[-1].min():.2g}", **shown}
        return {**shown, "ess": f"{last.ess[-1].mean():.2f}"}

    def store_result(
        self,
        state: State,
        params: Array,
        bridge: evidence.Bridge,
        recursive: Array,
        known: Information | None,
    ) -> None:
        """Keep the result."""
        is_free = self.fixed.layout.is_free
        weight = normalise(state.cloud.log_weight)
        alive = jnp.maximum(jnp.sum(weight.sum(-1) > 0), 1)
        result = Result(
            params,
            state.cloud.position,
            jnp.log(weight / alive),
            state.cloud.potential,
            bridge,
            recursive,
            None if known is None else information.invert(known, is_free),
            state.rng_key,
        )
        self.finished = fetch(result)
