"""How long a first result takes, in a new process, and what a second run compiles.

The model is the sleep study's, with a random intercept and slope. A process for
``numpyro.infer.SVI`` with a multivariate normal guide and three for ``JALAEM`` start in turn:
one that keeps no programs, one that keeps them in an empty folder, and one that finds them.
Run ``python examples/benchmarks/cold.py --help``; JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

METHODS = ("svi", "jala")
PROGRAMS = {"svi": ("off",), "jala": ("off", "empty", "filled")}
SVI_STEPS, JALA_STEPS = 1_000, 100


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(method: str) -> dict[str, Any]:
    """Import, fit, fit again: in this process, which must be new."""
    start = time.perf_counter()
    import jax
    import numpyro.infer
    import optax
    from jax import random
    from mixed import build

    from numpyro_jala import JALAEM

    import_s = time.perf_counter() - start
    fit = build("sleepstudy_slope")
    if method == "svi":
        guide = numpyro.infer.autoguide.AutoMultivariateNormal(fit.model)
        elbo = numpyro.infer.Trace_ELBO()
        svi = numpyro.infer.SVI(fit.model, guide, optax.adam(1e-2), elbo)

        def run(seed: int) -> None:
            key = random.key(seed)
            found = svi.run(key, SVI_STEPS, *fit.args, progress_bar=False)
            jax.block_until_ready(found.params)
    else:
        jala = JALAEM(fit.model)

        def run(seed: int) -> None:
            jala.run(random.key(seed), JALA_STEPS, *fit.args, progress_bar=False)

    compiled: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    hits: list[str] = []
    jax.monitoring.register_event_listener(
        lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
    )
    first_s = timed(lambda: run(0))
    first_compiled = len(compiled), sum(compiled)
    compiled.clear()
    second_s = timed(lambda: run(1))
    return {
        "method": method,
        "import_s": import_s,
        "first_s": first_s,
        "programs": first_compiled[0],
        "compile_s": first_compiled[1],
        "found": len(hits),
        "second_s": second_s,
        "second_programs": len(compiled),
    }


def start(method: str, folder: str) -> dict[str, Any]:
    """Measure in a new process that keeps its programs in a folder, or ``off``."""
    command = [sys.executable, __file__, "--method", method]
    environment = {**os.environ, "NUMPYRO_JALA_CACHE": folder}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, help="measure in this process")
    parser.add_argument("--only", choices=METHODS, help="start processes of one method")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.method:
        print(json.dumps(measure(options.method)))
        return
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            for method in [options.only] if options.only else METHODS:
                for kept in PROGRAMS[method]:
                    record = start(method, "off" if kept == "off" else folder)
                    files = [path for path in Path(folder).rglob("*") if path.is_file()]
                    record |= {"kept": kept, "num_files": len(files)}
                    record |= {"megabytes": sum(f.stat().st_size for f in files) / 1e6}
                    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
