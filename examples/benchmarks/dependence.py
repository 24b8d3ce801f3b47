"""How long the search for independent components takes, by rows and groups.

The model is a Bernoulli regression with a random intercept for each group; the groups have
to be found one by one. Run ``python examples/benchmarks/dependence.py --help``; JSON lines.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from records import emit

from numpyro_jala.model.dependence.find import find

SIZES = [(100_000, 10_000), (6_000_000, 1_000_000)]


def make_factors(num_rows: int, num_groups: int) -> Callable[..., Any]:
    """Return the terms of ``Bernoulli(logits=beta * x + u[group])``, u being normal."""
    rng = np.random.default_rng(0)
    group = rng.integers(num_groups, size=num_rows)
    covariate = rng.normal(size=num_rows).astype(np.float32)
    response = rng.integers(2, size=num_rows)

    def factors(params: Any, position: Any) -> Any:
        logits = params["beta"] * covariate + position[group]
        return {
            "u": dist.Normal(0, params["scale"]).log_prob(position),
            "y": dist.Bernoulli(logits=logits).log_prob(response),
        }

    return factors


def measure(num_rows: int, num_groups: int, repeats: int) -> None:
    """Time the search at one size."""
    params = {"beta": 0.5, "scale": 1.0}
    factors, position = make_factors(num_rows, num_groups), jnp.zeros(num_groups)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = find(factors, params, position)
        times.append(time.perf_counter() - start)
    assert np.array_equal(found.coordinates, np.arange(num_groups))
    where = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    size = {"num_rows": num_rows, "num_groups": num_groups}
    emit({**where, **size, "first_s": times[0], "best_s": min(times)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of them")
    options = parser.parse_args()
    for num_rows, num_groups in SIZES[: options.sizes]:
        measure(num_rows, num_groups, options.repeats)


if __name__ == "__main__":
    main()
