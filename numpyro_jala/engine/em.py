r"""Choose the next parameters: ascend the marginal likelihood on weighted scores.

The default is a Newton step on the observed information :math:`C - V`, the expected
second derivative of the potential less the covariance of its first (Louis 1982), both
along with the transport of the particles. The step is the best one within a trust region
in the weights' own metric: the variance of the log-weights that it causes is bounded, so
the cloud can always follow.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from numpyro_jala._typing import Array, Tree

#: Most parameters for which the default is a Newton step.
FEW_PARAMS = 64
#: Variance of the log-weights that one step of the parameters may cause.
TRUST = 0.1
#: The trust region goes this much further than the parameters would.
_ROOM = 10.0
#: Where the goal is known a step may cost this much more.
_HURRY = 4.0
#: Smallest share of the information that is taken as observed.
FLOOR = 0.05
#: Share of the information by products of scores that a smooth density does not fall below
#: where the parameters are right.
_KINKED = 0.1
_GAIN = 0.5
_GAIN_POWER = 0.6
_PATIENCE = 10.0
_MISSING_RATE = 0.1
#: Weight of step k in the average of the parameters is proportional to k to this power.
_AVERAGE_POWER = 3.0
#: Of the multiplier of the trust region: each search narrows it to one part in 32.
_SEARCHES, _TRIES = 6, 33


class Optimiser(NamedTuple):
    """``step(score, state, params) -> (params, state)`` on trees, and how to start it."""

    init: Callable[[Tree], Any]
    step: Callable[[Tree, Any, Tree], tuple[Tree, Any]]


def as_optimiser(optim: Any) -> Optimiser:
    """Accept an Optax transformation or a ``numpyro.optim`` optimiser."""
    if hasattr(optim, "get_params"):

        def numpyro_step(score: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
            state = optim.update(score, state)
            return optim.get_params(state), state

        return Optimiser(optim.init, numpyro_step)

    def optax_step(score: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        updates, state = optim.update(score, state, params)
        return optax.apply_updates(params, updates), state

    return Optimiser(optim.init, optax_step)


def divide_scores(sizes: dict[str, float]) -> optax.GradientTransformation:
    """Divide the score of each param site by a number.

    A scale that all the weights of a layer share has a score that grows with their
    number. Divided by it, one learning rate serves layers of any size (Kuntz et al.
    2023). Chain it before an optimiser: ``optax.chain(divide_scores(...), optax.sgd(0.1))``.

    Parameters
    ----------
    sizes
        A divisor for each param site that is to have one, as the latents it governs.

    Examples
    --------
    >>> divided = divide_scores({"scale": 100.0})
    >>> scores = {"scale": 50.0, "mean": 1.0}
    >>> divided.update(scores, divided.init(scores))[0]
    {'scale': 0.5, 'mean': 1.0}
    """

    def divide(updates: Any, params: Any = None) -> Any:
        def one(name: str, tree: Tree) -> Tree:
            return jax.tree.map(lambda leaf: leaf / sizes.get(name, 1.0), tree)

        return {name: one(name, tree) for name, tree in updates.items()}

    return optax.stateless(divide)


def default_for_many() -> optax.GradientTransformation:
    """Return Adam with a learning rate that decays with the square root of the steps."""
    return optax.adam(lambda count: 0.02 / jnp.sqrt(1.0 + count / 50.0))


def average(mean: Array, params: Array, num_steps: Array) -> Array:
    """Update an average of the parameters that forgets the first part of the run."""
    share = (1 + _AVERAGE_POWER) / (num_steps + _AVERAGE_POWER)
    return mean + jnp.minimum(share, 1.0) * (params - mean)


class Newton(NamedTuple):
    """What the default optimiser remembers.

    complete
        Expected second derivative of the potential, along with the transport.
    missing
        Covariance of the scores, averaged over steps.
    reversals
        How often the step turned back, which is when its gain shrinks (Kesten 1958).
    last_step
        To see whether it did.
    is_early
        Whether ``complete`` is none yet, or that of a much flattened likelihood.
    by_scores
        Whether it comes from first derivatives, see :func:`is_kinked`.
    """

    complete: Array  # (num_params, num_params)
    missing: Array  # (num_params, num_params)
    reversals: Array  # ()
    last_step: Array  # (num_params,)
    is_early: Array  # ()
    by_scores: Array  # ()


def is_near(newton: Newton, change: Array, num_steps: int, num_components: int) -> Array:
    """Tell whether a change of the parameters is small.

    The components can follow it in some steps, and the likelihood is nearly quadratic along
    it: within two standard errors if the latents were known. The first says nothing of
    a parameter on which the latents do not depend.
    """
    follows = num_steps_to(newton, change, num_components) <= num_steps
    return follows & (change @ newton.complete @ change <= 4.0)


def num_steps_to(newton: Newton, change: Array, num_components: int) -> Array:
    """Return in how many steps the components can follow a change of the parameters."""
    cost = change @ newton.missing @ change / num_components
    return jnp.sqrt(jnp.maximum(cost, 0.0) / (_HURRY * TRUST))  # rounding may be negative


def start_newton(num_params: int, dtype: Any) -> Newton:
    """Begin with no information."""
    zero = jnp.zeros((num_params, num_params), dtype)
    none = jnp.zeros((num_params,), dtype)
    early, kinked = jnp.asarray(True), jnp.asarray(False)
    return Newton(zero, zero, jnp.zeros((), dtype), none, early, kinked)


def is_kinked(
    newton: Newton,
    complete: Array,
    by_scores: Array,
    overshot: Array,
    num_components: int,
) -> Array:
    """Tell whether the second derivative of the potential says too little.

    It may not exist, or miss the kinks of a density like that of Laplace. Then it is far
    below what the products of scores make of it, as it is also where parameters are far
    off; but there a step does not go too far. The products of no more components than
    parameters have no rank to tell anything: of an autoregression, one component, steps by
    them ended 289 nats below the maximum.
    """
    missing = ~jnp.all(jnp.isfinite(complete))
    if num_components <= len(complete):
        return missing
    flat = jnp.diagonal(complete) < _KINKED * jnp.diagonal(by_scores)
    return missing | jnp.any(flat) & (overshot | newton.by_scores)


def remember(newton: Newton, covariance: Array, tempered: Array) -> Array:
    """Average the covariance of the scores over the last steps at the posterior.

    That of a flattened likelihood is much larger: remembered, it would let the first steps
    at the posterior go many times too far.
    """
    is_first = tempered | jnp.all(newton.missing == 0)
    rate = jnp.where(is_first, 1.0, _MISSING_RATE)
    return newton.missing + rate * (covariance - newton.missing)


def gain(newton: Newton) -> Array:
    """Return the share of a full Newton step to take."""
    return _GAIN / (1 + newton.reversals / _PATIENCE) ** _GAIN_POWER


def turned_back(newton: Newton, step: Array) -> Array:
    """Tell whether a step goes against the last one."""
    return (step @ newton.complete @ newton.last_step) < 0


class InformationBasis(NamedTuple):
    r"""A basis in which the complete information is the identity.

    basis
        Columns :math:`b_i` with :math:`b_i^\top C b_i = 1`, up to the floor.
    inverse
        Of the basis.
    observed
        The share of the information along each that is observed.
    """

    basis: Array  # (num_params, num_params)
    inverse: Array  # (num_params, num_params)
    observed: Array  # (num_params,)


def root(matrix: Array) -> tuple[Array, Array]:
    """Return R with R Rᵀ the inverse of a matrix made positive definite, and R⁻¹."""
    diagonal = jnp.abs(jnp.diagonal(matrix))
    scale = jnp.where(diagonal > 1e-25, jnp.sqrt(diagonal), 1.0)
    values, vectors = jnp.linalg.eigh(matrix / (scale[:, None] * scale))
    values = jnp.maximum(jnp.abs(values), 1e-4 * jnp.max(jnp.abs(values)) + 1e-20)
    size = jnp.sqrt(values)
    return vectors / size / scale[:, None], (vectors * size * scale[:, None]).T


def information_basis(
    complete: Array, missing: Array, floor: Array | float
) -> InformationBasis:
    """Decompose the observed information, each direction floored."""
    half, inverse = root(complete)
    fraction, vectors = jnp.linalg.eigh(half.T @ missing @ half)
    observed = jnp.maximum(1 - fraction, floor)
    return InformationBasis(half @ vectors, vectors.T @ inverse, observed)


def decrement(info: InformationBasis, score: Array) -> Array:
    r"""Return :math:`\frac12 g^\top I^{-1} g`, the Newton decrement."""
    return 0.5 * jnp.sum((info.basis.T @ score) ** 2 / info.observed)


def floor_for(tempered: Array) -> Array:
    """Return the floor of the observed share.

    Short of the posterior the information about some parameters is all missing, and
    their score is noise: take the steps of the EM algorithm there.
    """
    return jnp.where(tempered, 1.0, FLOOR)


def trusted_step(
    info: InformationBasis, score: Array, share: Array, cost: Array, reach: Array
) -> Array:
    r"""Return the best Newton step within the trust region.

    It minimises :math:`g \cdot d + \frac{1}{2\gamma} d^\top I d` subject to
    :math:`d^\top (V + T R^{-2}) d \le T`, with :math:`T` the constant ``TRUST``.

    Parameters
    ----------
    score
        :math:`g`, the weighted mean of the scores.
    share
        :math:`\gamma`, the gain.
    cost
        :math:`V`: ``d @ cost @ d`` is the variance of the log-weights that d causes.
    reach
        Diagonal of :math:`R`: how far each parameter may go in one step, at most.
    """
    # By Cauchy and Schwarz a full Newton step moves no parameter further than this. A
    # region that went on far beyond would be too long for its short axes to be seen.
    inverse_diagonal = jnp.sum(info.basis**2 / info.observed, -1)
    furthest = jnp.sqrt(2 * decrement(info, score) * inverse_diagonal)
    reach = jnp.minimum(reach, _ROOM * furthest + 1e-12 * reach)
    # In units of what the region allows, sizes that differ by orders of magnitude do no
    # harm: what is lost in rounding is the curvature along directions that are flat, and
    # there the region bounds the step.
    unit, _ = root(cost + jnp.diag(TRUST / reach**2))
    half = info.inverse @ unit
    curvature, vectors = jnp.linalg.eigh((half.T * info.observed) @ half)
    curvature = jnp.maximum(curvature, 1e-6 * jnp.max(curvature) + 1e-20)
    axes = unit @ vectors
    slope = share * (axes.T @ score)

    def lengths(multipliers: Array) -> Array:
        return jnp.linalg.norm(slope / (curvature + multipliers[:, None]), axis=-1)

    def narrow(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        tried = jnp.linspace(*bounds, _TRIES)
        first = jnp.sum(lengths(jnp.exp(tried)) > TRUST**0.5)
        last = jnp.minimum(first, _TRIES - 1)
        return tried[jnp.maximum(first - 1, 0)], tried[last]

    # The smallest multiplier that keeps to the region, by its logarithm. Many at a time,
    # since an accelerator waits at each turn of a loop.
    high = jnp.log(jnp.linalg.norm(slope) / TRUST**0.5 + 1e-30)
    _, high = lax.fori_loop(0, _SEARCHES, narrow, (high - 30.0, high))
    free = lengths(jnp.zeros(1, slope.dtype))[0] <= TRUST**0.5
    step = -axes @ (slope / (curvature + jnp.where(free, 0.0, jnp.exp(high))))
    return jnp.where(jnp.isfinite(step).all(), step, 0.0)


def shorten(step: Array, variance: Array, most: float) -> Array:
    """Scale a step down so that the variance it causes is at most a given one."""
    scale = jnp.minimum(1.0, jnp.sqrt(most / jnp.maximum(variance, 1e-30)))
    return jnp.where(jnp.isfinite(scale), scale, 0.0) * step
