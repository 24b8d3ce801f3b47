"""What a step costs: against a loop written by hand, and against its model evaluation.

Each part measures two things in turn, in one process, and prints JSON lines. Run
``python examples/benchmarks/speed.py --help``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fused
import jax
import jax.numpy as jnp
import numpy as np
import optax
from fits import logistic_model
from jax import lax, random
from records import emit

from numpyro_jala import JALAEM
from numpyro_jala.backend.precision import HIGHEST, THREE_PASSES, exactly
from numpyro_jala.engine import sampler
from numpyro_jala.engine.state import EM_STEP, REST
from numpyro_jala.inference import programs

sys.path.insert(0, str(Path(__file__).parents[1] / "paper"))
import networks  # noqa: E402

RATE = 1e-2
#: Digits, images and units of each network.
NETWORKS = {"network": ([4, 9], 1_000, 40), "wide network": ([2, 4, 7, 9], 2_500, 512)}


def seconds(function: Callable[[], Any]) -> float:
    """Time one call, to the end of what it computes."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def in_turn(repeats: int, **functions: Callable[[], Any]) -> dict[str, float]:
    """Call functions one after the other, again and again; return the median times."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        seconds(function)  # compiles
    for _ in range(repeats):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return {name: float(np.median(each)) for name, each in times.items()}


def plain_jala(model: Any, num_particles: int, step_size: float) -> JALAEM:
    """Return the paper's algorithm."""
    return JALAEM(
        model,
        optax.adam(RATE),
        num_particles=num_particles,
        num_islands=1,
        step_size=step_size,
        preconditioner=None,
        components="joint",
    )


def problem(name: str, num_particles: int) -> tuple[Any, ...]:
    """Return a model, its potential by hand, data, first particles and theta."""
    rng = np.random.default_rng(1)
    if name == "logistic":
        data = fused.logistic_data()
        first = {"w": 0.1 * rng.normal(size=(num_particles, 9)).astype(np.float32)}
        return logistic_model, fused.logistic_potential, data, first, jnp.zeros(()), 1e-3
    digits, num_images, num_units = NETWORKS[name]
    x, labels, *_ = networks.read_data(rng, digits, num_images)
    shapes = {"first": (784, num_units), "second": (num_units, len(digits))}
    first = {
        name: (0.03 * rng.normal(size=(num_particles, *shape))).astype(np.float32)
        for name, shape in shapes.items()
    }
    model = networks.make_model(num_units, len(digits))
    potential = partial(fused.network_potential, len(digits))
    return model, potential, (x, labels.astype(np.int32)), first, jnp.zeros(2), 1e-7


def against_fused(name: str, num_particles: int, num_steps: int, repeats: int) -> None:
    """Compare a whole run with the loop written by hand."""
    model, potential, data, first, theta, step_size = problem(name, num_particles)
    jala = plain_jala(model, num_particles, step_size)
    flat = np.concatenate([v.reshape(num_particles, -1) for v in first.values()], 1)
    precision = HIGHEST
    if jax.default_backend() == "gpu" and name in NETWORKS:
        precision = THREE_PASSES
    loop = fused.make(potential, step_size, RATE, 0.5, precision)
    key = random.key(0)

    def by_hand() -> Any:
        _, *found = loop(key, theta, jnp.asarray(flat), num_steps, *data)
        return jax.device_get(found)  # as a run brings its particles home

    def ours() -> Any:
        jala.run(key, num_steps, *data, init_particles=first, progress_bar=False)
        return jala.last_state

    times = in_turn(repeats, by_hand=by_hand, run=ours)
    ratio = times["run"] / times["by_hand"]
    shape = {"num_particles": num_particles, "num_steps": num_steps}
    emit({"part": "fused", "problem": name, **shape, **times, "ratio": ratio})


def against_evaluation(num_particles: int, repeats: int) -> None:
    """Compare a step at rest, and one of EM, with the evaluation of the model in it."""
    jala, data = JALAEM(logistic_model, num_particles=num_particles), fused.logistic_data()
    jala.run(random.key(0), 20, *data, progress_bar=False)
    assert jala._run is not None
    run, state, chunk = jala._run, jala.last_state, programs.CHUNK
    fixed, goal = run.fixed, state.target.params

    @jax.jit
    @exactly
    def evaluate(data: Any, position: Any) -> Any:
        def again(_: int, x: Any) -> Any:
            here = programs.problem_of(fixed, data)
            found, _ = sampler._evaluate(here, fixed.settings, state.target, x)
            used = (found.potential + found.slope + found.scores.sum(-1)).sum(1)
            return x - 1e-9 * (found.gradient + used[..., None])

        return lax.fori_loop(0, chunk, again, position)

    def run_steps(stage: int) -> Callable[[], Any]:
        numbers = np.asarray(stage), np.asarray(chunk), goal, np.asarray(0)
        return lambda: programs.run_steps(fixed, run.data, state, *numbers)

    times = in_turn(
        repeats,
        evaluation=lambda: evaluate(run.data, state.cloud.position),
        rest=run_steps(REST),
        ascent=run_steps(EM_STEP),
    )
    per_step = {f"{name}_ms": 1e3 * value / chunk for name, value in times.items()}
    share = 1 - times["evaluation"] / times["rest"]
    emit(
        {
            "part": "evaluation",
            "num_particles": num_particles,
            **per_step,
            "share_of_the_rest": share,
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["logistic", "network", "evaluation"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--particles", type=int, default=1_000, help="not of networks")
    options = parser.parse_args()
    for part in options.parts:
        if part == "logistic":
            against_fused(part, options.particles, options.steps, options.repeats)
        elif part in NETWORKS:
            against_fused(part, 50, options.steps, options.repeats)
        elif part == "evaluation":
            against_evaluation(options.particles, options.repeats)
        else:
            parser.error(f"{part!r} is not logistic, evaluation or one of {list(NETWORKS)}")


if __name__ == "__main__":
    main()
