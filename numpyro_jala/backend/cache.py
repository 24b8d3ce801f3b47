"""Keep compiled programs on disk, so that another process need not compile them again.

JAX does the keeping, under keys that hold its version, the program and the compiler's
options. Here is said where and when: in a folder of the user's, while a run of this package
compiles, and only if the user has no such folder for all of JAX.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

#: A folder for the programs, or one of the words below to keep none.
VARIABLE = "NUMPYRO_JALA_CACHE"
_OFF = ("", "0", "off", "no", "false")
#: Seconds of compiling that are worth a file: a run has two hundred small programs, which
#: together take as long as a large one.
_LEAST_SECONDS = 0.0
#: Bytes of files beyond which the oldest are deleted, down to half of it.
_MOST_BYTES = 2 * 2**30
#: Bytes that must be free on the disk.
_LEAST_FREE = 2**29


def set_program_cache(folder: str | os.PathLike[str] | None) -> None:
    """Choose where this process, and those it starts, keep compiled programs.

    A program that was kept is not compiled again, also by another process. By default it is
    kept in the user's cache folder. The environment variable ``NUMPYRO_JALA_CACHE``, a folder
    or ``off``, does the same as this function. Neither has an effect where JAX's own
    ``jax_compilation_cache_dir`` is set.

    Parameters
    ----------
    folder
        It is made if it does not exist, and may be deleted at any time. Whoever can write
        to it can run code in the processes that read it. None: keep nothing.
    """
    os.environ[VARIABLE] = "off" if folder is None else os.fspath(folder)


def folder() -> Path | None:
    """Return where programs are to be kept, None for nowhere."""
    said = os.environ.get(VARIABLE)
    if said is None:
        home = _user_cache()
        return None if home is None else home / "numpyro_jala"
    return None if said.strip().lower() in _OFF else Path(said).expanduser()


def _user_cache() -> Path | None:
    """Return the folder in which a system's programs keep what can be made again."""
    named = {"win32": "LOCALAPPDATA"}.get(sys.platform, "XDG_CACHE_HOME")
    if os.environ.get(named):
        return Path(os.environ[named])
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache")


@functools.cache
def _machine() -> str:
    """Return a name of this kind of machine.

    Programs use all that its processor can do, and another one may read the same disk.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    can = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    known = sorted({line for line in text.splitlines() if line.startswith(can)})
    digest = hashlib.sha256("\n".join(known or [text]).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:12]}"


def _ready(place: Path) -> bool:
    """Make a folder and some room in it; tell whether it can be written to."""
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"room")
            file.flush()
        _make_room(place)
        return shutil.disk_usage(place).free >= _LEAST_FREE
    except OSError:
        return False


@functools.cache
def _make_room(place: Path) -> None:
    """Delete the oldest files if there are too many bytes of them, once in a process."""
    files = [(path, path.stat()) for path in place.iterdir() if path.is_file()]
    size = sum(found.st_size for _, found in files)
    if size <= _MOST_BYTES:
        return
    for path, found in sorted(files, key=lambda each: each[1].st_mtime):
        if size <= _MOST_BYTES / 2:
            break
        path.unlink(missing_ok=True)
        size -= found.st_size


def _is_ours() -> bool:
    """Tell whether there is no cache for all of JAX, and no other process to agree with."""
    of_jax = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    return not of_jax and jax.process_count() == 1


@contextmanager
def kept() -> Iterator[None]:
    """Read programs from the disk and write them there, within this context.

    Where that fails they are compiled. Two processes may do so at once: what one has written
    by half the other compiles.
    """
    root = folder() if _is_ours() else None
    if root is None or not _ready(place := root / _machine()):
        yield
        return
    ours = {
        "jax_compilation_cache_dir": str(place),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
    }
    before = {name: getattr(jax.config, name) for name in ours}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation")
        try:
            _configure(ours)
            yield
        finally:
            _configure(before)


def _configure(options: dict[str, object]) -> None:
    """Set options of JAX's cache, which it reads anew after a reset."""
    for name, value in options.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
    compilation_cache.reset_cache()
