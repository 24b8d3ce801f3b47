"""The second derivative in the parameters, of particles that follow them."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import curvature
from numpyro_jala.engine.evaluation import Target


@pytest.mark.parametrize("few", [8, 1])
def test_particles_move_along(monkeypatch, few):
    """Both in forward mode and in reverse mode, against a closed form."""
    monkeypatch.setattr(curvature, "FEW_DIRECTIONS", few)
    position = random.normal(random.key(0), (3, 4, 2))
    weight = random.dirichlet(random.key(1), jnp.ones(24)).reshape(3, 4, 2)

    def potential(params, heat, x):
        return heat * (0.5 * (x - params[0]) ** 2 + jnp.exp(params[1]) * x**2)

    # An island's particles follow the first parameter by half as much, or by a third.
    follow = jnp.array([0.5, 0.5, 1 / 3])

    def motion(directions, x):
        return (directions[:, 0] * follow)[:, None, None] * jnp.ones_like(x)

    heat = jnp.array([[1.0, 0.7], [0.4, 1.0], [1.0, 1.0]])
    params = jnp.array([0.4, -0.3])
    target = Target(params, heat)
    found = curvature.second_derivative(potential, target, motion, weight, position)
    scale, by = np.exp(-0.3), np.asarray(weight * heat[:, None])
    follow = np.asarray(follow)[:, None, None]
    both = np.sum(by * 2 * scale * follow * position, (1, 2))
    expected = [
        [np.sum(by * ((1 - follow) ** 2 + 2 * scale * follow**2), (1, 2)), both],
        [both, np.sum(by * scale * position**2, (1, 2))],
    ]
    np.testing.assert_allclose(found, np.moveaxis(expected, -1, 0), rtol=1e-4)
