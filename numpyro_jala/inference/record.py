"""What happens in a run, and what it found."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_jala._typing import Array, PRNGKey
from numpyro_jala.backend import compilation
from numpyro_jala.backend.compilation import Programs
from numpyro_jala.backend.sharding import fetch, place
from numpyro_jala.engine import em, smc, turns
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.resampling import systematic
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.state import ANNEAL, EM_STEP, Info, State
from numpyro_jala.engine.weights import normalise, potential_scale_reduction
from numpyro_jala.inference import evidence, information
from numpyro_jala.inference.information import Information, Uncertainty
from numpyro_jala.inference.programs import Data, Fixed
from numpyro_jala.inference.snapshots import Snapshot
from numpyro_jala.model.sites import Trace


class Result(NamedTuple):
    """The estimate, the last cloud at it, and the evidence."""

    params: Array  # (num_params,), unconstrained
    position: Array  # (num_islands, num_particles, dim)
    log_weight: Array  # (num_islands, num_particles), summing to one in all
    potential: Array  # (num_islands, num_particles)
    bridge: evidence.Bridge
    recursive: np.ndarray  # (num_islands,), log-evidence along the path
    uncertainty: Uncertainty | None  # None without parameters, and with very many
    rng_key: PRNGKey
    compared: evidence.Compared | None = None  # where the evidence was estimated twice
    by_component: ByComponent | None = None  # None of a single one


class ByComponent(NamedTuple):
    """What is known of each component's data.

    log_evidence
        At the estimate.
    influence
        Nats by which it would be lower at the estimate from the other components' data;
        None where the information about the parameters was not computed.
    """

    log_evidence: np.ndarray  # (components,)
    influence: np.ndarray | None  # (components,)


class Ending(NamedTuple):
    """What is found at the end of a run.

    rounded_alike
        Particles whose potentials are rounded as the evidence is, if those were kept.
    """

    state: State  # at rest at the estimate
    params: Array  # (num_params,), unconstrained
    bridge: evidence.Bridge
    known: Information | None = None
    compared: evidence.Compared | None = None
    by_component: np.ndarray | None = None  # (components,), their log-evidence
    rounded_alike: Snapshot | None = None

    @property
    def cloud(self) -> Snapshot | Cloud:
        """The particles that tell of rounding."""
        return self.rounded_alike or self.state.cloud


class Look(NamedTuple):
    """What was found after so many EM steps, estimated afresh as at the end of a run."""

    num_steps: int
    log_evidence: float
    standard_error: float
    shortfall: float  # NaN with very many params


class HeavyTail(NamedTuple):
    """A component whose importance weights have a heavy tail."""

    component: int
    pareto_shape: float


@compilation.program(static_argnums=1)
def equalise(rng_key: PRNGKey, partition: Partition, cloud: Cloud) -> Cloud:
    """Give all particles the same weight, resampling each component by itself.

    A component whose particles in one island are all dead takes those of another island.
    """
    alive = jnp.isfinite(cloud.log_weight).any(-1)
    num_islands = len(alive)
    donor = jnp.where(alive, jnp.arange(num_islands)[:, None], jnp.argmax(alive, 0))

    def give(values: Array) -> Array:
        index = donor.reshape(donor.shape + (1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, index, 0)

    def give_rows(rows: Array) -> Array:
        if rows.shape[-1] == 0:
            return rows
        index = partition.spread(donor)[:, None]
        return jnp.take_along_axis(rows, index, 0)

    rows = jnp.zeros((*cloud.position.shape[:2], 0), cloud.position.dtype)
    nothing = jnp.zeros((*alive.shape, 0), cloud.position.dtype)
    whole = Cloud(
        position=give_rows(cloud.position),
        momentum=rows,
        log_weight=give(cloud.log_weight),
        potential=give(cloud.potential),
        gradient=rows,
        slope=nothing,
        scores=nothing,
        log_evidence=cloud.log_evidence,
    )
    return smc.resample(rng_key, partition, whole, systematic, jnp.ones_like(alive))


def path_evidence(recursive: Array) -> np.ndarray:
    """Return each island's log-evidence along the path, from that of its components.

    The logarithm of each is low by half its variance, which adds up over many.
    """
    each = np.asarray(recursive, np.float64)
    num_islands, num_components = each.shape
    if num_components == 1 or num_islands == 1:
        return each.sum(1)
    spread = np.var(each, 0, ddof=1)
    return np.asarray(np.sum(each + spread / 2, 1))


class Unsettled(NamedTuple):
    """What particles at rest remember of where they were.

    coordinate
        Of the latent that remembers the most.
    share
        Of its first deviation that is left.
    """

    coordinate: int
    share: float


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
        self.lost: dict[str, float] = {}
        self.heavy_tail: HeavyTail | None = None
        self.unsettled: Unsettled | None = None
        self.looks: list[Look] = []
        self.death = ""  # what is to be said of particles that died at the estimate
        self.given_up: float | None = None  # the tolerance that the most steps did not meet
        self._infos: dict[int, list[Any]] = {}

    def keep(self, stage: int, infos: Any, count: int) -> None:
        """Keep the first ``count`` rows of what a chunk of steps reported."""
        self.num_new = count
        settings = self.fixed.settings
        num_moves = count * int(turns.num_moves(settings, stage))
        self.num_evaluations += num_moves * settings.num_islands * settings.num_particles
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
    def earlier(self) -> Look | None:
        """What was found before the last steps, if that was looked at."""
        before = [look for look in self.looks if look.num_steps < self.count(EM_STEP)]
        return before[-1] if before else None

    @property
    def informs(self) -> bool:
        """Whether there are params, few enough to ask what the data say of them."""
        return 0 < self.fixed.layout.init_params.size <= em.FEW_PARAMS

    def maximises(self, state: State) -> bool:
        """Tell whether few parameters have moved, whose maximum is to be sought."""
        return self.fixed.settings.newton and int(state.num_steps) > 0 and self.informs

    def uncertainty(self, known: Information) -> Uncertainty:
        """Return how well the parameters are known."""
        return information.invert(known, self.fixed.layout.is_free)

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
        shown = {"log_evidence": f"{last.log_evidence[-1]:.2f}"}
        if stage == ANNEAL:
            shown = {"temperature": f"{last.temperature[-1]:.2g}", **shown}
        return {**shown, "ess": f"{last.ess[-1]:.2f}"}

    def store_result(self, end: Ending, recursive: Array) -> None:
        """Keep the result, given the components' log-evidence along the path as well."""
        (state, params, bridge, known, compared, *_), layout = end, self.fixed.layout
        cloud = state.cloud
        if not layout.partition.is_joint:
            cloud = equalise(random.fold_in(state.rng_key, 4), layout.partition, cloud)
        log_weight, potential = _together(cloud.log_weight, cloud.potential)
        uncertainty = None if known is None else self.uncertainty(known)
        result = Result(
            params,
            cloud.position,
            log_weight,
            potential,
            bridge,
            path_evidence(fetch(recursive)),
            uncertainty,
            state.rng_key,
            compared,
            _by_component(end, uncertainty),
        )
        self.finished = fetch(result)


@compilation.program(static_argnums=())
def _together(log_weight: Array, potential: Array) -> tuple[Array, Array]:
    """Return the weights of particles, one for all islands, and their potentials."""
    weight = normalise(log_weight)
    alive = jnp.maximum(jnp.sum(weight.sum(-1) > 0, 0), 1)[:, None]
    return jnp.log(weight / alive)[:, 0], potential.sum(1)


def _by_component(end: Ending, uncertainty: Uncertainty | None) -> ByComponent | None:
    """Return what is known of each component's data."""
    if end.by_component is None:
        return None
    influence = None
    if end.known is not None and end.known.by_component is not None:
        assert uncertainty is not None
        scores = end.known.by_component
        influence = information.influence(scores, uncertainty.covariance)
    return ByComponent(end.by_component, influence)
