"""One of two processes that fit a model together; the second dies in its second fit."""

import faulthandler
import os
import sys

import jax
import numpy as np
from jax import random
from jax.sharding import Mesh

from numpyro_jala import JALAEM
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import programs
from tests.tools import SCHOOLS, normal_means

#: Seconds after which a process that hangs says where, and ends.
HANGS = 1_000

OPTIONS = {"num_particles": 64, "num_islands": 4}


def fit(num_steps, checkpoint):
    """Fit the model on all devices of all processes."""
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    jala = JALAEM(normal_means, **OPTIONS, mesh=mesh)
    jala.run(
        random.key(0),
        num_steps,
        SCHOOLS,
        progress_bar=False,
        checkpoint=checkpoint,
        checkpoint_every=5,
    )
    return jala


def die(*args):
    """End this process as a machine does that loses its power."""
    os._exit(9)


def main(rank, port, checkpoint):
    faulthandler.dump_traceback_later(HANGS, exit=True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # One that hears of the other's death from a collective would wait for it at the end.
    times = {"heartbeat_timeout_seconds": 10, "shutdown_timeout_seconds": 10}
    jax.distributed.initialize(f"localhost:{port}", 2, rank, **times)
    jala = fit(10, checkpoint)
    mean = jala.get_samples()["x"].mean()
    print("FOUND", float(jala.params["mu"]), jala.log_evidence, float(mean), flush=True)
    run_steps = programs.run_steps

    def fatal(fixed, data, state, stage, *rest):
        step = die if rank == 1 and stage == EM_STEP else run_steps
        return step(fixed, data, state, stage, *rest)

    programs.run_steps = fatal
    fit(20, checkpoint)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
