"""Models of NumPyro's pages that ask for something else, or are refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from entry import PAGES, Array, Entry, box
from numpyro.distributions import constraints
from numpyro.distributions.transforms import L1BallTransform
from regression import cover_data, ordinal_data
from scipy import stats


def funnel(dim: int) -> None:
    """A funnel: the scale of nine numbers is another one. Nothing is observed."""
    log_variance = numpyro.sample("log_variance", dist.Normal(0.0, 3.0))
    numpyro.sample("x", dist.Normal(jnp.zeros(dim - 1), jnp.exp(log_variance / 2)))


def funnel_observed(y: Array) -> None:
    """The same funnel with noisy observations of its numbers."""
    log_variance = numpyro.sample("log_variance", dist.Normal(0.0, 3.0))
    with numpyro.plate("row", len(y)):
        x = numpyro.sample("x", dist.Normal(0.0, jnp.exp(log_variance / 2)))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


FUNNEL_DATA = np.array([0.3, -1.2, 0.8, 0.1, -0.4, 1.5, -0.7, 0.2, 0.6], np.float32)


def funnel_exact(_: dict[str, Any]) -> float:
    """Integrate over the logarithm of the variance; given it, the data are normal."""
    y = FUNNEL_DATA.astype(float)

    def log_density(log_variance: Array) -> Array:
        scale = np.sqrt(1 + np.exp(log_variance))
        given = stats.norm(0, scale).logpdf(y[:, None]).sum(0)
        return given + stats.norm(0, 3).logpdf(log_variance)

    return box(log_density, [(-27.0, 27.0)], num_nodes=400)


def improper_ordinal(x: Array, y: Array) -> None:
    """Ordered answers with cut points of which nothing is said but their order."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    ordered = dist.ImproperUniform(constraints.ordered_vector, (), event_shape=(2,))
    cuts = numpyro.sample("cuts", ordered)
    with numpyro.plate("row", len(x)):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cuts), obs=y)


def subsampled(x: Array, y: Array) -> None:
    """Logistic regression on 50 of 300 rows at a time."""
    slopes = numpyro.sample("slopes", dist.Normal(jnp.zeros(x.shape[-1]), 1.0).to_event(1))
    with numpyro.plate("row", len(x), subsample_size=50):
        rows = numpyro.subsample(x, event_dim=1)
        seen = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=rows @ slopes), obs=seen)


def angles(num: int = 40) -> Array:
    """Draw pairs of angles around two places."""
    rng = np.random.default_rng(71)
    centre = np.array([[-1.5, 2.0], [1.2, -0.5]])[rng.integers(0, 2, num)]
    return (centre + 0.3 * rng.normal(size=(num, 2))).astype(np.float32)


def protein(pairs: Array) -> None:
    """A mixture of two skewed distributions on a torus."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    phi_mean = numpyro.sample("phi_mean", dist.Uniform(0.0, 1.0))
    phi_count = numpyro.sample("phi_count", dist.Gamma(1.0, 0.5))
    psi_mean = numpyro.sample("psi_mean", dist.Uniform(0.0, 1.0))
    psi_count = numpyro.sample("psi_count", dist.Gamma(1.0, 0.5))
    with numpyro.plate("part", 2):
        phi = numpyro.sample("phi", dist.VonMises(jnp.pi, 2.0))
        psi = numpyro.sample("psi", dist.VonMises(0.0, 0.1))
        of_phi = dist.Beta(phi_mean * phi_count, (1 - phi_mean) * phi_count)
        of_psi = dist.Beta(psi_mean * psi_count, (1 - psi_mean) * psi_count)
        phi_size = numpyro.sample("phi_size", of_phi)
        psi_size = numpyro.sample("psi_size", of_psi)
        correlation = numpyro.sample("correlation", dist.Beta(2.0, 10.0))
        skew = numpyro.sample("skew", dist.Normal(0.0, 0.5).expand((2,)).to_event(1))
        skew = L1BallTransform()(skew)
    with numpyro.plate("pair", len(pairs), dim=-1):
        infer = {"enumerate": "parallel"}
        part = numpyro.sample("which", dist.Categorical(weights), infer=infer)
        sine = dist.SineBivariateVonMises(
            phi_loc=phi[part],
            psi_loc=psi[part],
            phi_concentration=1000 * phi_size[part],
            psi_concentration=1000 * psi_size[part],
            weighted_correlation=correlation[part],
        )
        numpyro.sample("pairs", dist.SineSkewed(sine, skew[part]), obs=pairs)


ENTRIES = {
    "funnel": Entry(funnel, (10,), PAGES + "examples/funnel.html", "a funnel, no data"),
    "funnel_observed": Entry(
        funnel_observed,
        (FUNNEL_DATA,),
        PAGES + "examples/funnel.html",
        "a funnel with data",
        funnel_exact,
        "closed form and quadrature",
        shown="log_variance",
    ),
    "ordinal_improper": Entry(
        improper_ordinal,
        ordinal_data(),
        PAGES + "tutorials/ordinal_regression.html",
        "ordered answers, improper prior",
    ),
    "subsampled": Entry(
        subsampled,
        cover_data(),
        PAGES + "examples/hmcecs.html",
        "logistic regression, subsampled",
    ),
    "protein_angles": Entry(
        protein,
        (angles(),),
        PAGES + "examples/ssbvm_mixture.html",
        "pairs of angles, skewed mixture",
        shown="phi",
    ),
}
