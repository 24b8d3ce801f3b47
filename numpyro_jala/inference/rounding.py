r"""What rounding does to the log-evidence, by potentials in double precision.

The potential of many rows is large, and in single precision it is off by about a unit of
its last digit. That of a constant in every row is alike for all particles, so that no
average takes it out, and alike for all components, so that their sum has it as often. But
where :math:`U` was rounded, :math:`V` was not, and :math:`p` is the posterior of :math:`U`,

.. math::

    \log \int e^{-V} - \log \int e^{-U} = \log E_p[e^{U - V}],

and :math:`U - V` hardly varies, so that few particles tell.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.backend.blocks import inner_programs
from numpyro_jala.backend.precision import exactly
from numpyro_jala.backend.sharding import fetch, on_mesh, share
from numpyro_jala.inference import estimation
from numpyro_jala.inference.draws import draws_at_once
from numpyro_jala.inference.evidence import Bridge
from numpyro_jala.inference.programs import Data, Fixed
from numpyro_jala.inference.record import Ending, Run

#: Share of the standard error that rounding may have unseen.
_UNSEEN = 0.2
#: Nats that no comparison of models turns on: less than this is only counted as error.
_NEGLIGIBLE = 1e-4
#: Units of the last digit that no rounding makes up.
_TOO_MUCH = 16.0
#: Error of a change as a share of it that makes it one of constants.
_CONSTANT = 0.1
#: Nats of error that a change may have in any case: they are added to the error bar.
_SURE = 0.02
#: Particles that are looked at first.
_FEW = 8
#: Particles times numbers of the data that are evaluated in double precision, about.
_ENOUGH = 2**25


class Correction(NamedTuple):
    """What rounding took from the log-evidence of each component, and the error of that."""

    log_evidence: np.ndarray  # (components,)
    variance: np.ndarray  # (components,)


def correct(run: Run, end: Ending) -> Ending:
    """Put right what rounding does to the log-evidence, or at least to its error."""
    size = np.asarray(fetch(_mean_size(end.cloud.potential)))
    most, found = np.finfo(size.dtype).eps * size.astype(float), end.bridge
    # At worst it is alike in all components.
    least = max(_UNSEEN * float(found.standard_error), _NEGLIGIBLE)
    # A small potential may be the difference of large terms, as that of large counts is.
    seen = 0.0 if most.sum() > least else _at_few_particles(run, end)
    by_component = _in_double(run, end) if max(most.sum(), seen) > least else None
    if by_component is None or not _is_known(by_component, most):
        gain = seen if by_component is None else abs(by_component.log_evidence.sum())
        unknown = most.sum() if seen <= least else max(most.sum(), gain)
        error = np.hypot(found.standard_error, unknown)
        return end._replace(bridge=found._replace(standard_error=error))
    gain = by_component.log_evidence
    each = None if end.by_component is None else end.by_component + gain
    end = end._replace(bridge=_moved(found, by_component), by_component=each)
    if end.compared is None:
        return end
    pair = [_moved(one, by_component) for one in end.compared[:2]]
    return end._replace(compared=end.compared._replace(bridge=pair[0], drawn=pair[1]))


def _at_few_particles(run: Run, end: Ending) -> float:
    """Return by how much double precision changes the potential of a few particles at most.

    Of one alone it may be nothing by chance.
    """
    if run.data.mode is not None:  # the coordinates themselves would be others
        return 0.0
    cloud = end.cloud
    rounded = np.asarray(fetch(cloud.potential[:1, :, :_FEW]))
    if rounded.dtype == np.float64:
        return 0.0
    exact = _exact(run, end.params, cloud.position[:1, :_FEW])
    if exact is None:
        return 0.0
    run.num_evaluations += rounded.shape[2]
    alive = np.isfinite(np.asarray(fetch(cloud.log_weight[:1, :, :_FEW]))).all(1)
    change = np.abs(np.sum(rounded - exact, 1))
    return float(change.max(initial=0.0, where=alive & np.isfinite(change)))


def _draws_numbers(program: Any) -> bool:
    """Tell whether a program draws random numbers: in double precision they are others."""
    return any(
        equation.primitive.name.startswith("random_")
        or any(map(_draws_numbers, inner_programs(equation)))
        for equation in program.eqns
    )


def _is_known(by: Correction, most: np.ndarray) -> bool:
    """Tell whether double precision changes what rounding can, or all particles by as much.

    Else it may make another model, as of probabilities that are cut off at the precision.
    """
    can = bool(np.all(np.abs(by.log_evidence) <= _TOO_MUCH * (most + most.mean())))
    error, gain = np.sqrt(by.variance.sum()), abs(by.log_evidence.sum())
    return can or bool(error <= max(_CONSTANT * gain, _SURE))


def _moved(found: Bridge, by: Correction) -> Bridge:
    gain = by.log_evidence.sum()
    return found._replace(
        log_evidence=found.log_evidence + gain,
        standard_error=np.sqrt(found.standard_error**2 + by.variance.sum()),
        islands=found.islands + gain,
    )


def _in_double(run: Run, end: Ending) -> Correction | None:
    """Compare potentials with those in double precision, where the model has these."""
    cloud = end.cloud
    num_islands, num_particles, dim = cloud.position.shape
    width = dim + sum(np.size(array) for array in run.placed.arrays)
    wanted = min(max(_ENOUGH // (num_islands * width), 1), num_particles)
    # In blocks of as many as the evidence was found with: sums are then rounded alike.
    block = draws_at_once(run.fixed, num_particles)
    num_blocks = max(wanted // block, 1)
    few, all_ = min(wanted, num_blocks * block), num_blocks * block
    exact = _exact(run, end.params, cloud.position[:, :few])
    if exact is None:
        return None
    run.num_evaluations += num_islands * few
    rounded = cloud.potential
    if end.rounded_alike is None:
        blocks = jnp.split(cloud.position[:, :all_], num_blocks, 1)
        rounded = _potentials(run.fixed, run.placed, end.params, blocks)
        run.num_evaluations += num_islands * all_
    change = np.asarray(fetch(rounded[..., :few])) - exact
    return _compare(np.asarray(fetch(cloud.log_weight[..., :few]), float), change)


def _exact(run: Run, params: Array, position: Array) -> np.ndarray | None:
    """Return potentials in double precision, None of a model that has none such."""
    at = run.fixed, run.placed, params
    if _draws_numbers(_potentials.trace(*at, [position])):
        return None
    try:
        return _potentials_in_double(*at, position)
    except Exception:  # of a model that does not go with double precision
        return None


def _compare(log_weight: np.ndarray, change: np.ndarray) -> Correction | None:
    """Average over particles, (num_islands, components, num_particles)."""
    alive = np.isfinite(log_weight) & np.isfinite(change)
    if not alive.any(2).all():
        return None
    weight = np.where(alive, np.exp(log_weight - log_weight.max(2, keepdims=True)), 0.0)
    middle = np.sum(change, (0, 2), where=alive) / alive.sum((0, 2))
    ratio = np.exp(np.where(alive, change - middle[:, None], 0.0))
    means = np.sum(weight * ratio, 2) / np.sum(weight, 2)
    mean = means.mean(0)
    variance = means.var(0, ddof=1) / len(means) / mean**2
    return Correction(middle + np.log(mean) + variance / 2, variance)


@jax.jit
def _mean_size(potential: Array) -> Array:
    """Return how large the potential of each component is."""
    return jnp.abs(jnp.where(jnp.isfinite(potential), potential, 0.0)).mean((0, 2))


@compilation.program(static_argnums=0)
@on_mesh
@exactly
def _potentials(fixed: Fixed, data: Data, params: Array, blocks: list[Array]) -> Array:
    """Return the potentials (num_islands, components, num_particles) of particles."""
    evaluate = partial(estimation.evaluate_draws, fixed, data, params)
    return share(jnp.concatenate(lax.map(evaluate, jnp.stack(blocks)), 2))


def _potentials_in_double(
    fixed: Fixed, data: Data, params: Array, position: Array
) -> np.ndarray:
    """Return the same in double precision, one island at a time to save memory."""
    at = fetch((data, params, position))
    with jax.enable_x64(True):
        data, params, position = jax.tree.map(_widen, at)
        settings = fixed.settings._replace(mesh=None, num_islands=1)
        wide = Fixed(fixed.layout.in_double, settings)
        islands = [_potentials(wide, data, params, [x[None]]) for x in position]
        return np.concatenate(islands)


def _widen(array: Array) -> Array | np.ndarray:
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    return np.asarray(array, np.float64) if is_real else array
