"""Fit a million groups of zeros and ones, and compare with quadrature in double precision.

The first run is cold, the second, of other data, is warm. Meant for an accelerator; fewer
groups do on a CPU. JSON lines; run ``python examples/benchmarks/million.py --help``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from group_models import Array, Data, arrange, binary, draw, lattice
from jax import lax, random
from records import emit

from numpyro_jala import JALAEM

#: Groups whose integrals are evaluated at a time.
CHUNK = 10_000
WIDTH = 0.15


def log_likelihood(data: Data) -> Callable[[jax.Array], jax.Array]:
    """Make the log-likelihood of intercept, slope and standard deviation."""
    nodes, log_weight = lattice(1, WIDTH)
    num_chunks = max(len(data.y) // CHUNK, 1)
    chunks = [jnp.asarray(each.reshape(num_chunks, -1, each.shape[1])) for each in data]

    def of_chunk(params: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        predictor = params[0] + params[1] * x[..., None] + params[2] * nodes[:, 0]
        log_prob = -jnp.logaddexp(0.0, jnp.where(y > 0, -1, 1)[..., None] * predictor)
        return jax.nn.logsumexp(log_prob.sum(1) + log_weight, axis=1).sum()

    def total(params: jax.Array) -> jax.Array:
        found = lax.map(lambda chunk: jax.checkpoint(of_chunk)(params, *chunk), chunks)
        return found.sum()

    return total


def maximise(data: Data, start: Array) -> tuple[Array, Array, float]:
    """Return the maximum, its standard errors, and the log-likelihood at the start."""
    with jax.enable_x64(True):
        fn = log_likelihood(data)
        value, slope, second = map(jax.jit, (fn, jax.grad(fn), jax.hessian(fn)))
        params = jnp.asarray(start)
        covariance = -jnp.linalg.inv(second(params))
        for _ in range(5):  # from within a tenth of a standard error
            params = params + covariance @ slope(params)
        errors = np.sqrt(np.diag(-jnp.linalg.inv(second(params))))
        return np.asarray(params), errors, float(value(start))


def measure(jala: JALAEM, num_groups: int, seed: int) -> dict[str, object]:
    """Fit a data set, and compare with quadrature."""
    study = binary(num_groups, 2.0)
    data = draw(study, seed)
    args = arrange(study, data)
    start = time.perf_counter()
    jala.run(random.key(seed), None, *args, progress_bar=False)
    seconds = time.perf_counter() - start
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    params = np.array([*jala.params["beta"], jala.params["sd"]], float)
    best, errors, exact = maximise(data, params)
    known = jala.standard_errors()
    found = np.array([*known["beta"], known["sd"]], float)
    return {
        "num_groups": num_groups,
        "seed": seed,
        "device": jax.devices()[0].device_kind,
        "seconds": round(seconds, 2),
        "peak_gb": memory / 1e9,
        "num_particles": jala.num_particles,
        "error": jala.log_evidence - exact,
        "se": jala.log_evidence_se,
        "z": (jala.log_evidence - exact) / jala.log_evidence_se,
        "worst_shift": np.abs((params - best) / errors).max(),
        "worst_se_error": np.abs(found / errors - 1).max(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    fitter = JALAEM(binary(options.groups, 2.0).model)
    for each_seed in range(options.seeds):
        emit(measure(fitter, options.groups, each_seed))
