"""A run on disk, so that it can go on after its process has died.

A file holds arrays and JSON, nothing that could be executed. It is written beside its
place and then renamed, so that at any time there is a whole one.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from numpyro_jala._typing import Array, PRNGKey, Tree
from numpyro_jala.backend.sharding import fetch, is_key, place, spans_processes
from numpyro_jala.backend.versions import version_of
from numpyro_jala.engine.state import ANNEAL, EM_STEP, Info, State
from numpyro_jala.inference import programs
from numpyro_jala.inference.record import Look, Run

_PACKAGES = ("numpyro_jala", "numpyro", "jax", "jaxlib")
#: What a file says that it belongs to, and how a sentence calls it.
_BELONGINGS = {
    "versions": "other versions",
    "data": "other data",
    "model": "another model",
    "options": "other options",
    "start": "another rng_key or start",
}


#: Stages whose history is kept; what follows them is done again.
_STAGES = (ANNEAL, EM_STEP)


class Identity(NamedTuple):
    """What must be the same for a run to go on as if nothing had happened."""

    versions: dict[str, str]
    data: str
    model: str
    options: str
    start: str


def _plain(leaf: Any) -> np.ndarray:
    """Return an array of plain numbers: those of a key, or the bytes of other types."""
    leaf = fetch(leaf)
    array = np.asarray(random.key_data(leaf) if is_key(leaf) else leaf)
    is_native = array.dtype.kind in "biufc"
    return array if is_native else np.frombuffer(array.tobytes(), np.uint8)


def _digest(*parts: Any) -> str:
    """Hash numbers, arrays and texts by their content."""
    state = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray | jax.Array):
            array = _plain(part)
            state.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
        else:
            state.update(repr(part).encode())
    return state.hexdigest()


def _digest_tree(tree: Tree) -> str:
    return _digest(str(jax.tree.structure(tree)), *jax.tree.leaves(tree))


def identify(run: Run, start: Tree) -> Identity:
    """Say what a run is: its program, its data, and where it starts.

    The model and the optimiser are known by the programs that they make, in which
    numbers that they close over are written out.
    """
    layout, settings = run.fixed
    shapes = layout.init_params, jnp.ones((), layout.anchor.dtype), layout.anchor

    def potential(arrays: list[Array], params: Array, heat: Array, full: Array) -> Array:
        moved = full if layout.moving is None else full[layout.moving]
        return layout.joint(arrays)(params, heat, moved)

    programs = [jax.jit(potential).lower(run.data.arrays, *shapes).as_text()]
    if not settings.newton and settings.optimiser is not None:
        params = layout.unravel_params(layout.init_params)
        memory = settings.optimiser.init(params)
        optimise = jax.jit(settings.optimiser.step)
        programs.append(optimise.lower(params, memory, params).as_text())
    chosen = settings._replace(optimiser=None, mesh=None)
    return Identity(
        versions={name: version_of(name) for name in _PACKAGES},
        data=_digest_tree((run.args, run.kwargs)),
        model=_digest(sorted(run.trace), *programs),
        options=_digest(tuple(chosen)),
        start=_digest_tree(start),
    )


class Checkpoint:
    """Where a run is kept, how often, and what it is."""

    def __init__(
        self, path: str | os.PathLike[str], every: int, identity: Identity
    ) -> None:
        self.path = Path(path)
        self.every = every
        self.identity = identity
        self._num_unsaved = 0
        self._has_warned = False

    def note(self, run: Run, state: State) -> None:
        """Count the steps that a run has just taken, and save it when it is time."""
        self._num_unsaved += run.num_new
        if self._num_unsaved >= self.every:
            self.save(run, state)

    def save(self, run: Run, state: State) -> None:
        """Write the run; where that fails, warn and let it go on."""
        self._num_unsaved = 0
        packed = _pack(run, state, self.identity)
        if spans_processes(run.fixed.settings.mesh) and jax.process_index() != 0:
            return
        part = self.path.with_name(self.path.name + ".part")
        try:
            with open(part, "wb") as file:
                np.savez(file, allow_pickle=False, **packed)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path)
        except OSError as error:
            part.unlink(missing_ok=True)
            if not self._has_warned:
                warnings.warn(
                    f"The checkpoint {str(self.path)!r} could not be written: {error}. "
                    "The run goes on, and its result will be in memory.",
                    stacklevel=4,
                )
            self._has_warned = True

    def load(self, run: Run, rng_key: PRNGKey, num_steps: int | None) -> State | None:
        """Return the state that was saved, with its history in the run, if there is one."""
        if not self._exists(run.fixed.settings.mesh):
            return None
        try:
            with np.load(self.path, allow_pickle=False) as file:
                saved = dict(file)
            header = json.loads(str(saved["header"]))
            identity = Identity(**header["identity"])
        except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(
                f"{str(self.path)!r} is not a checkpoint of numpyro_jala ({error}). Give "
                "another path, or delete the file."
            ) from error
        self._check(identity)
        state = _unpack(run, rng_key, saved, header)
        if num_steps is not None and run.count(EM_STEP) > num_steps:
            raise ValueError(
                f"The checkpoint {str(self.path)!r} has taken {run.count(EM_STEP)} steps, "
                f"more than num_steps={num_steps}. Give another path, or delete the file."
            )
        return state

    def _exists(self, mesh: Mesh | None) -> bool:
        """Tell whether there is a file, for all processes that fit together."""
        is_here = self.path.exists()
        if not spans_processes(mesh):
            return is_here
        seen = process_allgather(np.asarray(is_here))
        if seen.any() and not seen.all():
            raise ValueError(
                f"Some processes find the checkpoint {str(self.path)!r} and others do "
                "not. Give a path that all of them can read."
            )
        return bool(seen.all())

    def _check(self, found: Identity) -> None:
        for field, what in _BELONGINGS.items():
            theirs, ours = getattr(found, field), getattr(self.identity, field)
            if theirs != ours:
                shown = f" ({theirs}, not {ours})" if field == "versions" else ""
                raise ValueError(
                    f"The checkpoint {str(self.path)!r} belongs to a run with {what}"
                    f"{shown}, so this one cannot go on from it. Give another path, or "
                    "delete the file."
                )


def check_path(path: str | os.PathLike[str], every: int) -> None:
    """Check that a checkpoint can be written there."""
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise ValueError(
            f"checkpoint={str(path)!r} cannot be written: it is a file's path in a folder "
            "that exists and is writable."
        )
    if every < 1:
        raise ValueError(f"checkpoint_every={every} is not a positive number of steps.")


def _pack(run: Run, state: State, identity: Identity) -> dict[str, np.ndarray]:
    history = {stage: run.infos(stage) for stage in _STAGES}
    rows = {
        f"info_{stage}_{field}": np.asarray(value)
        for stage, info in history.items()
        if info is not None
        for field, value in info._asdict().items()
    }
    leaves = {f"state_{i}": _plain(x) for i, x in enumerate(jax.tree.leaves(state))}
    header = {
        "identity": identity._asdict(),
        "num_evaluations": run.num_evaluations,
        "tied_draws": run.tied_draws,
        "looks": run.looks,
    }
    return {"header": np.asarray(json.dumps(header)), **leaves, **rows}


def _unpack(
    run: Run, rng_key: PRNGKey, saved: dict[str, np.ndarray], header: dict[str, Any]
) -> State:
    """Put the history into the run, and return the state."""
    run.num_evaluations, run.tied_draws = header["num_evaluations"], header["tied_draws"]
    run.looks = [Look(*each) for each in header["looks"]]
    for stage in _STAGES:
        names = [f"info_{stage}_{field}" for field in Info._fields]
        if names[0] in saved:
            rows: list[Any] = [saved[name] for name in names]
            run.restore(stage, Info(*rows))
    params = run.fixed.layout.init_params
    blank = jax.eval_shape(
        partial(programs.initial_state, run.fixed), rng_key, run.data, params
    )
    leaves, tree = jax.tree.flatten(blank)
    restored: list[Any] = [
        _restore(leaf, saved[f"state_{i}"], rng_key) for i, leaf in enumerate(leaves)
    ]
    return place(run.fixed.settings.mesh, jax.tree.unflatten(tree, restored))


def _restore(blank: Any, saved: np.ndarray, rng_key: PRNGKey) -> Array:
    if jnp.issubdtype(blank.dtype, jax.dtypes.prng_key):
        return random.wrap_key_data(jnp.asarray(saved), impl=random.key_impl(rng_key))
    if saved.dtype != blank.dtype:
        saved = saved.view(blank.dtype).reshape(blank.shape)
    return jnp.asarray(saved)
