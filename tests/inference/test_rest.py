"""Particles rest until they have forgotten where they were."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_jala.engine.evaluation import Derivatives
from numpyro_jala.engine.partition import joint
from numpyro_jala.engine.smc import initial_cloud
from numpyro_jala.inference.rest import forget

ISLANDS, PARTICLES = 8, 4_000


def cloud(position, log_weight=None):
    zeros = jnp.zeros((ISLANDS, 1, PARTICLES))
    found = Derivatives(zeros, jnp.zeros_like(position), zeros, zeros[..., None][..., :0])
    dim = position.shape[-1]
    made = initial_cloud(joint(dim), position, position, found, jnp.zeros(()))
    return made if log_weight is None else made._replace(log_weight=log_weight)


def normals(seed, dim):
    return np.random.default_rng(seed).normal(size=(ISLANDS, PARTICLES, dim))


def test_what_is_left_is_the_autocorrelation():
    rho = np.array([0.9, 0.5, 0.2])
    old = 3.0 + normals(0, 3)
    new = 3.0 + rho * (old - 3.0) + np.sqrt(1 - rho**2) * normals(1, 3)
    left = forget(jnp.ones(3), cloud(jnp.asarray(old)), cloud(jnp.asarray(new)))
    # A correlation of so many pairs has a standard error below this.
    tolerance = 4 / np.sqrt(ISLANDS * PARTICLES)
    np.testing.assert_allclose(left, rho, atol=tolerance)
    again = forget(left, cloud(jnp.asarray(old)), cloud(jnp.asarray(new)))
    np.testing.assert_allclose(again, rho**2, atol=2 * tolerance)


def test_a_heavy_tail_that_stays_is_seen():
    """The bulk is drawn anew, and one particle in fifty stays far out."""
    old, new = normals(0, 1), normals(1, 1)
    far = np.arange(PARTICLES) % 50 == 0
    sign = np.where(normals(2, 1)[:, far] > 0, 1, -1)
    old[:, far] = 10.0
    new[:, far] = 10.0 * sign  # so that only its square stays
    left = forget(jnp.ones(1), cloud(jnp.asarray(old)), cloud(jnp.asarray(new)))
    assert left[0] > 0.9


def test_a_latent_that_does_not_move_has_forgotten_nothing():
    old = np.zeros((ISLANDS, PARTICLES, 1))
    assert forget(jnp.ones(1), cloud(jnp.asarray(old)), cloud(jnp.asarray(old))) == 1


def test_particles_without_weight_do_not_count():
    old, new = normals(0, 1), normals(1, 1)
    dead = np.arange(PARTICLES) < PARTICLES // 2
    new[:, dead] = old[:, dead]
    new[:, 0] = np.nan
    log_weight = jnp.broadcast_to(jnp.where(dead, -jnp.inf, 0.0), (ISLANDS, 1, PARTICLES))
    after = cloud(jnp.asarray(new), log_weight)
    left = forget(jnp.ones(1), cloud(jnp.asarray(old)), after)
    assert left[0] == pytest.approx((ISLANDS * PARTICLES) ** -0.5, abs=0.03)
