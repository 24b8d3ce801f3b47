r"""The multivariate Student t with four degrees of freedom.

What is drawn to be weighed is drawn from it: its tails are heavier than those of most
posteriors, so that few draws have a weight without bound. With a factor :math:`L` and
whitened draws :math:`z = L^{-1}(x - m)` its log-density is

.. math::

    \log\frac{\Gamma((4 + d) / 2)}{\Gamma(2)} - \frac d2 \log 4\pi - \log|L|
        - \frac{4 + d}{2} \log(1 + z^2 / 4).
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import gammaln

from numpyro_jala._typing import Array

#: Fixed: :func:`radius` inverts its distribution.
DEGREES = 4.0
#: From the start that :func:`radius` has two steps are exact to ten digits.
_HALLEY_STEPS = 2


def radius(uniform: Array) -> Array:
    r"""Return :math:`\sqrt{4 / \chi^2_4}` at a quantile of the chi-squared distribution.

    A normal vector times it is a t. Half of the chi-squared, y, has the tail
    :math:`(1 + y) e^{-y}`, here set to ``uniform``.
    """
    log_tail = jnp.log(uniform)
    y = jnp.sqrt(-2 * log_tail) - 0.7 * log_tail

    def refine(_: int, y: Array) -> Array:
        miss = jnp.log1p(y) - y - log_tail
        slope, bend = -y / (1 + y), -1 / (1 + y) ** 2
        return jnp.maximum(y - 2 * miss * slope / (2 * slope**2 - miss * bend), 1e-12)

    return jnp.sqrt(DEGREES / (2 * lax.fori_loop(0, _HALLEY_STEPS, refine, y)))


def log_density(squares: Array, dim: int | np.ndarray, log_determinant: Array) -> Array:
    """Return log-densities, given the squared lengths of whitened draws.

    Parameters
    ----------
    dim
        Of the draws; broadcasts against ``squares``, as does ``log_determinant``.
    log_determinant
        Of the factor.
    """
    half = 0.5 * (DEGREES + dim)
    log_norm = gammaln(half) - gammaln(DEGREES / 2) - 0.5 * dim * jnp.log(DEGREES * jnp.pi)
    return log_norm - log_determinant - half * jnp.log1p(squares / DEGREES)
