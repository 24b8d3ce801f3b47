"""Quasi-random draws of importance sampling, which move with the parameters.

Proposals come in, fitted at some parameters, and how each component follows these. The
same draws then serve nearby parameters, with weights that stay nearly as equal.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_jala._typing import Array, Potential, PRNGKey
from numpyro_jala.inference import importance
from numpyro_jala.inference.evidence import Gaussian
from numpyro_jala.inference.programs import Fixed

#: Draws of an island that are evaluated at a time where there are many components: with
#: 1,000 groups a score takes 13 % less than with 64, as more of it stays in the caches.
_DRAWS_AT_ONCE = 16
#: The score of the marginal likelihood takes this share of the evidence's draws, if all
#: components are small; in more dimensions it is noisier.
_SCORE_SHARE = 4
#: Most numbers of importance draws that particles are taken from.
_MOST_REDRAWN = 2**24
#: Fewest draws at once, and most bytes of an array of the draws of all islands.
_FEWEST_AT_ONCE, _MOST_BYTES = 8, 2**31


class Draws(NamedTuple):
    """What defines the draws of importance sampling, and their weights.

    level
        The lowest potential of each component: differences to it have more digits.
    num_blocks
        How many blocks of points serve for sums, the first ones: one program for all.
    origin
        The parameters that the proposal was made for.
    motion
        How the proposal's location follows the parameters from there.
    """

    rng_key: PRNGKey
    points: Array | np.ndarray  # (most blocks, draws of a block, dimensions)
    proposal: Gaussian
    level: Array  # (components,)
    num_blocks: Array  # ()
    origin: Array  # (num_params,)
    motion: Array  # (num_params, dim)

    @property
    def num_draws(self) -> Array:
        """How many of an island serve for sums."""
        return self.num_blocks * self.points.shape[1]

    def fewer(self, num_draws: int) -> Draws:
        """Take about so many draws for sums, or all."""
        most, size = self.points.shape[:2]
        return self._replace(num_blocks=jnp.asarray(min(max(num_draws // size, 1), most)))

    def at(self, params: Array) -> Draws:
        """Move the draws to other parameters."""
        mean = self.proposal.mean + (params - self.origin) @ self.motion
        return self._replace(proposal=self.proposal._replace(mean=mean), origin=params)

    def following(self, potential_fn: Potential) -> Potential:
        """Return the potential of latents that move with the parameters as the draws do."""

        def potential(params: Array, temperature: Array, position: Array) -> Array:
            moved = position + (params - self.origin) @ self.motion
            return potential_fn(params, temperature, moved)

        return potential


def define_draws(
    fixed: Fixed,
    rng_key: PRNGKey,
    num_draws: int,
    proposal: Gaussian,
    level: Array,
    origin: Array,
    motion: Array | None = None,
) -> Draws:
    """Define so many quasi-random draws of each island."""
    points = _sobol_blocks(fixed, num_draws)
    if motion is None:
        motion = jnp.zeros((origin.size, fixed.layout.dim), origin.dtype)
    num_blocks = jnp.asarray(len(points))
    return Draws(rng_key, points, proposal, level, num_blocks, origin, motion)


def num_for_score(fixed: Fixed) -> int:
    """Return how many draws of an island serve for the score of the likelihood."""
    is_small = fixed.layout.partition.has_small_components
    return fixed.settings.num_draws // (_SCORE_SHARE if is_small else 1)


def num_for_particles(fixed: Fixed) -> int:
    """Return how many draws of an island particles are taken from, zero for none.

    Of small components, unless those of all islands were too many: twice as many as there
    are particles, or a few more.
    """
    settings, layout = fixed.settings, fixed.layout
    wanted = 2 ** math.ceil(math.log2(2 * settings.num_particles))
    num_draws = min(wanted, settings.num_draws)
    are_few = settings.num_islands * num_draws * layout.dim <= _MOST_REDRAWN
    return num_draws if are_few and layout.partition.has_small_components else 0


def _sobol_blocks(fixed: Fixed, num_draws: int) -> np.ndarray:
    """Return points of a Sobol' sequence, (num_blocks, draws of a block, dimensions).

    They are data of the programs that use them: a compiler would work on a constant for long.
    """
    partition = fixed.layout.partition
    points = importance.sobol_points(num_draws, int(partition.sizes.max()) + 1)
    blocks = points.reshape(-1, draws_at_once(fixed, num_draws), points.shape[1])
    return blocks.astype(fixed.layout.anchor.dtype)


def draws_at_once(fixed: Fixed, num_draws: int) -> int:
    """Return how many draws of an island to evaluate at a time."""
    size = min(_DRAWS_AT_ONCE, num_draws)
    width = fixed.settings.num_islands * fixed.layout.width
    while size > _FEWEST_AT_ONCE and size * width > _MOST_BYTES:
        size //= 2
    return size
