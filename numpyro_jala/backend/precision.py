"""How exactly matrices are multiplied, where a device would round their entries.

Accelerators round the factors of a product of float32 matrices unless told otherwise. A
gradient can bear that. A potential of some thousand nats cannot: it would be off by nats,
and the evidence with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from numpyro_jala._typing import Array
from numpyro_jala.backend.blocks import inner_programs

Function = TypeVar("Function", bound=Callable[..., Any])

#: Exact to float32 everywhere.
HIGHEST = "highest"
#: As exact and about twice as fast on large matrices: three products of halved digits.
THREE_PASSES = "BF16_BF16_F32_X3"
#: With fewer latents than this their products are too small to gain by it.
_MANY_LATENTS = 1_000


def exactly(function: Function) -> Function:
    """Multiply matrices in float32, whatever the default is."""

    @wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision(HIGHEST):
            return function(*args, **kwargs)

    return exact  # type: ignore[return-value]


def total(*parts: Array | np.ndarray) -> Array | np.ndarray:
    """Sum arrays over their last axis and add them up, without the error of rounding.

    In double precision where the values are known. Where they are traced there may be none:
    then each addition of a tree keeps what it rounds off (Møller 1965), and only the sum is
    rounded.
    """
    shape = np.broadcast_shapes(*(part.shape[:-1] for part in parts))
    if not any(isinstance(part, jax.core.Tracer) for part in parts):
        sums = [np.sum(np.asarray(part, np.float64), -1) for part in parts]
        return np.asarray(sum(np.broadcast_to(each, shape) for each in sums))
    full = [jnp.broadcast_to(part, (*shape, part.shape[-1])) for part in parts]
    values = jnp.concatenate(full, -1)
    lost = jnp.zeros_like(values)
    while (size := values.shape[-1]) > 1:
        (first, second), (a, b) = (_halves(each, size) for each in (values, lost))
        values = first + second
        back = values - first
        lost = a + b + ((first - (values - back)) + (second - back))
    return (values + lost).sum(-1)


def _halves(values: Array, size: int) -> list[Array]:
    """Part the last axis in two, of an even length."""
    rows = [(0, 0)] * (values.ndim - 1)
    return jnp.split(jnp.pad(values, [*rows, (0, size % 2)]), 2, -1)


def choose(platform: str, jaxpr: Jaxpr, num_latents: int) -> str:
    """Return the fastest precision at which a potential is right to float32."""
    if platform != "gpu" or num_latents < _MANY_LATENTS:
        return HIGHEST
    return THREE_PASSES if _has_plain_products(jaxpr) else HIGHEST


def roughly(function: Function) -> Function:
    """Multiply matrices as fast as the device's default allows, whatever was asked for.

    This serves gradients. The weights hold for any drift of the particles that is a
    function of where they are, so its rounding costs nothing but a little variance.
    """

    def rough(*args: Any) -> Any:
        exact, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        faster = jaxpr_as_fun(ClosedJaxpr(_relax(exact.jaxpr), exact.consts))
        return jax.tree.unflatten(jax.tree.structure(shape), faster(*jax.tree.leaves(args)))

    return rough  # type: ignore[return-value]


def _relax(jaxpr: Jaxpr) -> Jaxpr:
    """Let all matrix products of a program be as precise as the default is."""

    def relaxed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return ClosedJaxpr(_relax(value.jaxpr), value.consts)
        return _relax(value) if isinstance(value, Jaxpr) else value

    def one(equation: Any) -> Any:
        params = {name: relaxed(value) for name, value in equation.params.items()}
        if equation.primitive is lax.dot_general_p:
            params["precision"] = None
        return equation.replace(params=params)

    eqns = [one(equation) for equation in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)  # type: ignore[no-untyped-call]


def _has_plain_products(jaxpr: Any) -> bool:
    """Tell whether all products are of float32 matrices, and none is a convolution."""
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name, equation.invars
        if name == "conv_general_dilated":
            return False
        if name == "dot_general" and any(v.aval.dtype != jnp.float32 for v in inputs):
            return False
    inner = [program for each in jaxpr.eqns for program in inner_programs(each)]
    return all(map(_has_plain_products, inner))
