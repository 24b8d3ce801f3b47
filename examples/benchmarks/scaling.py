"""How the cost of a step grows with particles, latents and devices.

``particles``: a logistic regression with nine latents. ``latents``: normal means, each seen
once. ``devices``: the same islands on 1, 2, 4 and 8 devices, which on a CPU share its cores.
JSON lines; run ``python examples/benchmarks/scaling.py --help``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import cache
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from fits import logistic_model
from fused import logistic_data
from jax import random
from jax.sharding import Mesh
from records import emit
from speed import in_turn

from numpyro_jala import JALAEM
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import programs
from numpyro_jala.jalaem import Start

ISLANDS = 8
#: Among so many steps two take a second derivative, whatever the size.
NUM_STEPS = 20
NOTHING_GIVEN = Start(None, None, None, None)


def means_model(y: Any) -> None:
    """See each of many means once."""
    centre = numpyro.param("centre", 0.0)
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(centre, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def measure(
    jala: JALAEM, data: tuple[Any, ...], start: Start = NOTHING_GIVEN
) -> dict[str, float]:
    """Return the time of a step of EM that has settled, and its program's memory."""
    run = jala._prepare(random.key(0), random.key(1), start, data, {})
    state = jala._first_state(random.key(2), run, start)
    at_end = np.ones(state.target.temperature.shape, np.float32)
    target = state.target._replace(temperature=at_end)
    state = state._replace(target=target, plan=state.plan._replace(target=target))
    numbers = np.asarray(EM_STEP), np.asarray(NUM_STEPS), target.params, np.asarray(0)
    run_steps = programs.run_steps.lower(run.fixed, run.placed, state, *numbers).compile()
    memory = run_steps.memory_analysis()
    state = run_steps(run.placed, state, *numbers)[0]
    seconds = in_turn(3, run_steps=lambda: run_steps(run.placed, state, *numbers))[
        "run_steps"
    ]
    return {
        "step_ms": 1e3 * seconds / NUM_STEPS,
        "ns_per_particle": 1e9 * seconds / NUM_STEPS / jala.num_particles,
        "memory_mb": (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 1e6,
        "particles_mb": state.cloud.position.nbytes / 1e6,
    }


@cache
def fitted() -> JALAEM:
    """Fit the logistic regression."""
    jala = JALAEM(logistic_model)
    jala.run(random.key(3), NUM_STEPS, *logistic_data(), progress_bar=False)
    return jala


def near_posterior(num_particles: int) -> Start:
    """Draw latents of the logistic regression nearly from the posterior."""
    few, rng = fitted().get_samples()["w"], np.random.default_rng(4)
    drawn = few[rng.integers(len(few), size=num_particles)]
    drawn += 0.1 * few.std(0) * rng.normal(size=drawn.shape).astype(np.float32)
    return Start(fitted().params, {"w": drawn}, None, None)


def by_particles(powers: tuple[int, ...]) -> None:
    """Grow the cloud."""
    for power in powers:
        # Islands of equal size, of about a power of ten in all.
        count = ISLANDS * max(round(10**power / ISLANDS), 4)
        jala = JALAEM(logistic_model, num_particles=count)
        found = measure(jala, logistic_data(), near_posterior(count))
        emit({"part": "particles", "num_particles": count, **found})


def by_latents(powers: tuple[int, ...]) -> None:
    """Grow the model."""
    for power in powers:
        y = np.random.default_rng(0).normal(size=10**power).astype(np.float32)
        jala = JALAEM(means_model, num_particles=256, num_islands=ISLANDS)
        found = measure(jala, (y,))
        emit({"part": "latents", "num_latents": len(y), **found})


def on_devices(num_particles: int) -> None:
    """Spread the islands over all devices of this process."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("devices",)) if devices.size > 1 else None
    jala = JALAEM(logistic_model, num_particles=num_particles, mesh=mesh)
    found = measure(jala, logistic_data(), near_posterior(num_particles))
    emit({"part": "devices", "num_devices": devices.size, **found})


def by_devices(counts: tuple[int, ...]) -> None:
    """Start a process with each number of devices."""
    for count in counts:
        flags = f"{os.environ.get('XLA_FLAGS', '')} "
        flags += f"--xla_force_host_platform_device_count={count}"
        subprocess.run(
            [sys.executable, __file__, "one"],
            check=True,
            env={**os.environ, "XLA_FLAGS": flags},
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["particles", "latents", "devices"]
    parser.add_argument("parts", nargs="*", default=parts)
    parser.add_argument("--largest", type=int, default=5, help="power of ten")
    options = parser.parse_args()
    for part in options.parts:
        if part == "particles":
            by_particles(tuple(range(2, options.largest + 1)))
        elif part == "latents":
            by_latents(tuple(range(1, options.largest + 1)))
        elif part == "devices":
            by_devices((1, 2, 4, 8))
        elif part == "one":
            on_devices(8_000)
        else:
            parser.error(f"{part!r} is not one of {parts}")


if __name__ == "__main__":
    main()
