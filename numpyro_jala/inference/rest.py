"""How long particles rest at fixed parameters: until they have forgotten where they were.

Annealing leaves too few particles in the tails of a posterior that is far from Gaussian, and
moves bring them there in their own time. That time shows in how the latents correlate with
what they were some moves ago. Islands that all start alike agree with each other long before.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array
from numpyro_jala.backend import compilation
from numpyro_jala.backend.sharding import fetch
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.state import REST, State
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import clouds
from numpyro_jala.inference.loop import run_steps
from numpyro_jala.inference.record import Run, Unsettled

#: Moves of each round. After the last, what is left is told.
ROUNDS = (8, 16, 32, 64, 64, 64, 64, 64)
#: Share of the first deviation that may be left. After eight moves, with half of it left, the
#: log-evidence of a logistic horseshoe was 0.1 low at an error of 0.05; now it is 0.04 low.
FORGOTTEN = 0.05


def settle(run: Run, state: State, params: Array) -> State:
    """Rest at the parameters, one component as long as it takes."""
    state = clouds.go(run, state, params)
    if not run.fixed.layout.partition.is_joint or run.data.mode is not None:
        return state
    left = jnp.ones(run.fixed.layout.dim)
    for num_moves in ROUNDS:
        before = state.cloud
        state = run_steps(run, state, REST, num_moves, params)
        left = forget(left, before, state.cloud)
        shares = np.asarray(fetch(left))
        run.unsettled = Unsettled(int(shares.argmax()), float(shares.max()))
        if run.unsettled.share < FORGOTTEN:
            break
    return state


@compilation.program(static_argnums=())
def forget(left: Array, before: Cloud, after: Cloud) -> Array:
    """Return what is left of the first deviations after one more round.

    Of each latent, (dim,): of itself or of its square, whichever remembers more. Squares see
    the few particles in a heavy tail.
    """
    weight = normalise(after.log_weight)[:, 0]

    def centred(values: Array) -> Array:
        values = jnp.where(weight[..., None] > 0, values, 0)  # the dead are not finite
        return values - jnp.einsum("ip,ipc->ic", weight, values)[:, None]

    def correlation(old: Array, new: Array) -> Array:
        both, *own = (
            jnp.einsum("ip,ipc,ipc->c", weight, first, second)
            for first, second in ((old, new), (old, old), (new, new))
        )
        variance = own[0] * own[1]
        # A latent that does not move at all has forgotten nothing.
        return jnp.where(variance > 0, both / jnp.sqrt(variance), 1.0)

    old, new = centred(before.position), centred(after.position)
    squares = centred(old**2), centred(new**2)
    found = jnp.maximum(correlation(old, new), correlation(*squares))
    # Correlations of so many particles have this noise at least.
    return left * jnp.clip(found, np.prod(weight.shape) ** -0.5, 1.0)
