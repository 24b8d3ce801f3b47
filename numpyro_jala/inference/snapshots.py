"""What is kept of particles at rest, and several such clouds taken as one."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from numpyro_jala._typing import Array
from numpyro_jala.engine.partition import Partition
from numpyro_jala.engine.smc import Cloud
from numpyro_jala.engine.weights import normalise


class Snapshot(NamedTuple):
    """What a cloud at rest is asked for later.

    gradient
        None of several components, which are not asked: it is a third of the memory.
    """

    log_weight: Array  # (num_islands, components, num_particles)
    position: Array  # (num_islands, num_particles, dim)
    potential: Array  # (num_islands, components, num_particles)
    gradient: Array | None  # (num_islands, num_particles, dim)


def take(cloud: Cloud, partition: Partition) -> Snapshot:
    """Keep what is needed of a cloud."""
    gradient = cloud.gradient if partition.is_joint else None
    return Snapshot(cloud.log_weight, cloud.position, cloud.potential, gradient)


class Together(NamedTuple):
    """Several clouds at the same parameters as one, weights summing to one in islands."""

    weight: Array  # (num_islands, components, draws)
    position: Array  # (num_islands, draws, dim)
    potential: Array  # (num_islands, components, draws)
    gradient: Array  # (num_islands, draws, dim), zeros where it was not kept


def put_together(clouds: list[Snapshot]) -> Together:
    """Take several clouds as one."""
    weight = jnp.concatenate([normalise(cloud.log_weight) for cloud in clouds], 2)
    position = jnp.concatenate([cloud.position for cloud in clouds], 1)
    gradients = [cloud.gradient for cloud in clouds if cloud.gradient is not None]
    return Together(
        weight / len(clouds),
        position,
        jnp.concatenate([cloud.potential for cloud in clouds], 2),
        jnp.concatenate(gradients, 1) if gradients else jnp.zeros_like(position),
    )
