"""What a model with an exact likelihood looks like to a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpyro
from numpyro.distributions import constraints


class Case(NamedTuple):
    """A model, its data, and its exact log-likelihood as a function of free params."""

    model: Callable[..., None]
    args: tuple[Any, ...]
    unpack: Callable[[np.ndarray], dict[str, Any]]  # from free numbers to the params
    pack: Callable[[dict[str, Any]], np.ndarray]
    log_likelihood: Callable[[dict[str, Any]], float]
    start: np.ndarray


def positive(name: str, value: Any) -> Any:
    """Declare a positive param."""
    return numpyro.param(name, value, constraint=constraints.positive)


def fraction(name: str, value: Any) -> Any:
    """Declare a param between zero and one."""
    return numpyro.param(name, value, constraint=constraints.unit_interval)
