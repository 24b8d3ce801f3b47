"""From the result of a run to what ArviZ holds. This file alone knows ArviZ."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import xarray as xr

from numpyro_jala.backend.columns import over_columns
from numpyro_jala.backend.versions import version_of
from numpyro_jala.engine.state import ANNEAL, EM_STEP, Info
from numpyro_jala.engine.weights import effective_fraction
from numpyro_jala.inference import programs
from numpyro_jala.inference.record import Run
from numpyro_jala.model.sites import describe_dims, observed_data
from numpyro_jala.results.diagnostics import diagnostics, num_observations
from numpyro_jala.results.estimates import estimates, param_leaves
from numpyro_jala.results.log_evidence import best_evidence, failure, island_evidence

_PACKAGES = ("numpyro_jala", "numpyro", "jax", "arviz")
#: Probability of the intervals that are stored.
_INTERVAL = 0.9
#: Bytes of draws beyond which fewer are kept, together with a summary of all.
_MOST_BYTES = 2**26


#: Draws of the observed sites, and the log-likelihood of what was observed.
Predicted = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def _name(name: str) -> str:
    """Return a name that xarray's groups accept."""
    return name.replace("/", ".")


def _dataset(
    values: dict[str, Any], leading: tuple[str, ...], dims: dict[str, dict[int, Any]]
) -> xr.Dataset:
    """Lay arrays out with their plates as dimensions, and a coordinate for each axis."""
    variables, coords = {}, {}
    for name, value in values.items():
        array = np.asarray(value)
        inner = array.shape[len(leading) :]
        plates = dims.get(name, {})
        axes = list(leading)
        num_own = 0
        for place, size in enumerate(inner, -len(inner)):
            plate, plate_size = plates.get(place, ("", 0))
            if plate_size == size and _name(plate) not in axes:
                axes.append(_name(plate))
            else:
                axes.append(f"{_name(name)}_dim_{num_own}")
                num_own += 1
        variables[_name(name)] = (axes, array)
        for axis, size in zip(axes, array.shape, strict=True):
            coords[axis] = np.arange(size)
    return xr.Dataset(variables, coords)


def _stage_fields(info: Info) -> dict[str, Any]:
    shown = (
        "log_evidence",
        "log_evidence_se",
        "ess",
        "ess_lowest",
        "resampled",
        "step_size",
        "grad_norm",
    )
    return {name: getattr(info, name) for name in shown}


def em_fields(run: Run) -> dict[str, np.ndarray]:
    """Return the traces of the EM steps: what was watched, and every param site."""
    info = run.infos(EM_STEP)
    if info is None:
        return {}
    fields = _stage_fields(info) if run.weighs else {"grad_norm": info.grad_norm}
    if info.params.shape[1]:
        leaves = param_leaves(programs.constrain_trace(run.fixed, info.params))
        taken = {"step", *fields}
        fields |= {f"{n}_param" if n in taken else n: leaf for n, leaf in leaves.items()}
    return fields


def _attrs(run: Run) -> dict[str, Any]:
    settings = run.fixed.settings
    renamed = [name for name in run.trace if "/" in name]
    known = {
        "num_params": int(run.fixed.layout.init_params.size),
        "num_observations": num_observations(run),
        "num_particles": settings.num_islands * settings.num_particles,
        "inference_library": "numpyro_jala",
        "renamed_sites": str({name: _name(name) for name in renamed}),
        **{f"{name}_version": version_of(name) for name in _PACKAGES},
    }
    return known | _weighted_attrs(run) if run.weighs else known


def _weighted_attrs(run: Run) -> dict[str, Any]:
    log_evidence, error = best_evidence(run)
    settings = run.fixed.settings
    return {
        "log_evidence": log_evidence,
        "log_evidence_se": error,
        "failure": failure(run),
        "num_islands": settings.num_islands,
        "num_components": run.fixed.layout.partition.num_components,
        "reference": _reference(run),
        "resampling": settings.resampling,
        "ess_threshold": settings.ess_threshold,
        **{f"diagnostic_{k}": v for k, v in diagnostics(run).items()},
    }


def _reference(run: Run) -> str:
    """Name where annealing starts."""
    if run.data.from_prior:
        return "prior"
    return "Gaussian" if run.data.mode is None else "Gaussian at the mode"


def _num_kept(samples: dict[str, np.ndarray]) -> int | None:
    """Return how many draws of a chain to keep, None for all."""
    size = sum(value.nbytes for value in samples.values())
    num_draws = min((value.shape[1] for value in samples.values()), default=1)
    return None if size <= _MOST_BYTES else max(1, num_draws * _MOST_BYTES // size)


def _thin(samples: dict[str, np.ndarray], count: int | None) -> dict[str, np.ndarray]:
    """Keep evenly spaced draws: neighbours may be copies of one particle."""
    if count is None:
        return samples
    thinned = {}
    for name, value in samples.items():
        places = np.linspace(0, value.shape[1] - 1, count).round().astype(int)
        thinned[name] = value[:, places]
    return thinned


def _quantile(ordered: np.ndarray, level: float) -> np.ndarray:
    """Return a quantile of sorted rows: for very many columns quicker than by NumPy."""
    place = level * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _latent_summary(samples: dict[str, np.ndarray], dims: dict[str, Any]) -> xr.Dataset:
    """Return mean, standard deviation and quantiles of every latent, from all draws."""
    low, high = (1 - _INTERVAL) / 2, (1 + _INTERVAL) / 2

    def describe(draws: np.ndarray) -> np.ndarray:
        ordered = np.sort(draws, axis=0)
        quantiles = [_quantile(ordered, q) for q in (low, 0.5, high)]
        return np.stack([draws.mean(0), draws.std(0), *quantiles])

    def describe_all(value: np.ndarray) -> np.ndarray:
        flat = value.reshape(value.shape[0] * value.shape[1], -1)
        return over_columns(describe, flat).reshape(-1, *value.shape[2:])

    described = {name: describe_all(value) for name, value in samples.items()}
    names = ["mean", "sd", f"{low:.0%}", "50%", f"{high:.0%}"]
    return _dataset(described, ("statistic",), dims).assign_coords(statistic=names)


def groups(
    run: Run,
    samples: dict[str, np.ndarray],
    weighted: dict[str, np.ndarray],
) -> dict[str, xr.Dataset]:
    """Return the groups of the result, of equally weighted draws and of weighted ones."""
    result = run.result
    dims = describe_dims(run.trace)
    chains = ("chain", "draw")
    num_kept = _num_kept(samples)
    found = {
        "posterior": _dataset(_thin(samples, num_kept), chains, dims),
        "sample_stats": _dataset(
            _thin({"lp": -np.asarray(result.potential)}, num_kept), chains, {}
        ),
        "observed_data": _dataset(observed_data(run.trace), (), dims),
        "constant_data": _dataset(_constants(run), (), {}),
    }
    if run.weighs:
        stats = {
            "log_marginal_likelihood": island_evidence(run),
            "ess": np.asarray(effective_fraction(result.log_weight)),
        }
        by_island = _dataset(stats, ("chain",), {})
        found["sample_stats"] = found["sample_stats"].merge(by_island)
        weights = {"log_weight": np.asarray(result.log_weight)}
        if num_kept is None:
            found["weighted_posterior"] = _dataset(weighted | weights, chains, dims)
        else:
            found["latent_summary"] = _latent_summary(samples, dims)
    if run.fixed.layout.init_params.size:
        found["estimate"] = _estimate(run)
    traced = em_fields(run)
    if traced:
        found["em_trace"] = _dataset(traced, ("step",), {})
    annealed = run.infos(ANNEAL)
    if annealed is not None:
        fields = _stage_fields(annealed) | {"temperature": annealed.temperature}
        found["anneal_trace"] = _dataset(fields, ("step",), {})
    return found


def _estimate(run: Run) -> xr.Dataset:
    """Return each param site's value, standard error and 90 % interval."""
    layout, result = run.fixed.layout, run.result
    found = estimates(layout, result.params, result.uncertainty, prob=_INTERVAL)
    stacked = {name: np.stack(each) for name, each in found.items()}
    data = _dataset(stacked, ("statistic",), {})
    data = data.assign_coords(statistic=["estimate", "se", "low", "high"])
    return data.assign_attrs(prob=_INTERVAL)


def _constants(run: Run) -> dict[str, np.ndarray]:
    """Return the arrays among the model's arguments that are not observed."""
    seen = [np.asarray(v) for v in observed_data(run.trace).values()]
    named = {f"arg_{i}": value for i, value in enumerate(run.args)} | run.kwargs
    return {
        name: np.asarray(value)
        for name, value in named.items()
        if isinstance(value, np.ndarray | jax.Array)
        and not any(np.array_equal(value, other) for other in seen)
    }


def to_inference_data(
    run: Run,
    samples: dict[str, np.ndarray],
    weighted: dict[str, np.ndarray],
    predicted: Predicted | None = None,
) -> Any:
    """Return an ``InferenceData``, or a ``DataTree`` where ArviZ is 1.0 or later."""
    found, attrs = groups(run, samples, weighted), _attrs(run)
    if predicted is not None:
        chains = ("chain", "draw")
        new, log_likelihood = predicted
        plates = describe_dims(run.trace, events=False)
        found["posterior_predictive"] = _dataset(new, chains, describe_dims(run.trace))
        found["log_likelihood"] = _dataset(log_likelihood, chains, plates)
    if not version_of("arviz").startswith("0."):  # to import it takes more than a second
        tree = xr.DataTree.from_dict({f"/{name}": data for name, data in found.items()})
        tree.attrs = attrs
        return tree
    with warnings.catch_warnings():
        # ArviZ 0.23 announces its successor on import.
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
    return arviz.InferenceData(attrs=attrs, warn_on_custom_groups=False, **found)
