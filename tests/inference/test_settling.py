"""Whole fits as pure functions, of models whose likelihood has a closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax, random
from numpyro.distributions import constraints
from scipy.optimize import minimize
from scipy.special import gammaln
from scipy.stats import multivariate_normal, norm

from numpyro_jala import JALAEM
from numpyro_jala.engine import sampler

NUM_GROUPS, NUM_ROWS, NUM_VECTORS = 32, 4, 12


def counts(y):
    """A skewed rate for each group; nothing but plates says what the groups are."""
    shape = numpyro.param("shape", 1.0, constraint=constraints.positive)
    inverse = numpyro.param("inverse", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", y.shape[0], dim=-2):
        rate = numpyro.sample("rate", dist.Gamma(shape, inverse))
        with numpyro.plate("rows", y.shape[1], dim=-1):
            numpyro.sample("y", dist.Poisson(rate), obs=y)


def draw_counts(shape, scale, seed):
    rng = np.random.default_rng(seed)
    rate = rng.gamma(shape, scale, (NUM_GROUPS, 1))
    return rng.poisson(rate, (NUM_GROUPS, NUM_ROWS)).astype(np.float32)


def log_likelihood_of_counts(y, shape, inverse):
    """Of negative multinomial counts."""
    y = np.asarray(y, float)
    total, num_rows = y.sum(1), y.shape[1]
    each = gammaln(shape + total) - gammaln(shape) + shape * np.log(inverse)
    each -= (shape + total) * np.log(inverse + num_rows)
    return each.sum() - gammaln(y + 1).sum()


def maximum_of_counts(y):
    def short(z):
        return -log_likelihood_of_counts(y, *np.exp(z))

    options = {"xatol": 1e-7, "fatol": 1e-10, "maxiter": 4000}
    return -minimize(short, np.zeros(2), method="Nelder-Mead", options=options).fun


def whole_fit(jala, rng_key, *data, num_steps=15):
    state = jala.init(rng_key, *data)

    def step(current, _):
        new, info = jala.update(current, *data)
        return new, info.died

    state, _ = lax.scan(step, state, length=num_steps)
    return jala.finish(state, *data)


def test_data_sets_that_are_fitted_at_once_each_have_their_components():
    jala = JALAEM(counts, num_islands=4, num_particles=32)
    laws = (2.0, 0.5), (1.0, 1.5), (3.0, 1.0), (1.5, 2.0)
    data = np.stack([draw_counts(*law, seed) for seed, law in enumerate(laws)])
    fit = jax.jit(jax.vmap(lambda key, y: whole_fit(jala, key, y)))
    found = fit(random.split(random.key(0), len(data)), data)
    by_component = (len(data), 4, NUM_GROUPS)
    assert found.state.target.temperature.shape == by_component
    assert found.state.cloud.log_weight.shape == (*by_component, 8)
    for i, y in enumerate(data):
        params = {name: float(value[i]) for name, value in found.params.items()}
        here = log_likelihood_of_counts(y, **params)
        # A tenth of a standard error is 0.005 nats.
        assert maximum_of_counts(y) - here < 0.005
        error = float(found.log_evidence[i]) - here
        assert abs(error) < 4 * found.standard_error[i] < 0.1


SIZE = 5
#: Latents of a group depend on each other, so that components of five cannot be split.
SCALE_TRIL = np.tril(0.3 + 0.1 * np.arange(SIZE * SIZE).reshape(SIZE, SIZE) / SIZE)
SCALE_TRIL = np.float32(SCALE_TRIL / 2 + np.eye(SIZE))


def vectors(y):
    """Normal vectors that are seen with noise: components of more than a few latents."""
    centre = numpyro.param("centre", 0.0)
    noise = numpyro.param("noise", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", len(y)):
        law = dist.MultivariateNormal(centre, scale_tril=SCALE_TRIL)
        x = numpyro.sample("x", law)
        numpyro.sample("y", dist.Normal(x, noise).to_event(1), obs=y)


def log_likelihood_of_vectors(y, centre, noise):
    covariance = np.float64(SCALE_TRIL) @ SCALE_TRIL.T + noise**2 * np.eye(SIZE)
    return multivariate_normal(np.full(SIZE, centre), covariance).logpdf(y).sum()


def test_components_of_more_latents_are_bridged_and_their_particles_stand_for_them():
    rng = np.random.default_rng(1)
    y = 0.7 + rng.normal(size=(NUM_VECTORS, SIZE)) @ SCALE_TRIL.T
    y = np.float32(y + 1.2 * rng.normal(size=y.shape))
    jala = JALAEM(vectors, num_particles=256, num_islands=4)
    found = jax.jit(lambda key: whole_fit(jala, key, y))(random.key(0))
    params = {name: float(value) for name, value in found.params.items()}
    here = log_likelihood_of_vectors(y, **params)

    def short(z):
        return -log_likelihood_of_vectors(y, z[0], np.exp(z[1]))

    best = -minimize(short, np.zeros(2), method="Nelder-Mead", tol=1e-8).fun
    assert best - here < 0.005
    error = float(found.log_evidence) - here
    assert abs(error) < 4 * found.standard_error < 0.4
    # Each particle has a weight in each component.
    cloud = found.state.cloud
    assert cloud.log_weight.shape == (4, NUM_VECTORS, 64)
    weight = np.exp(cloud.log_weight - np.max(cloud.log_weight, -1, keepdims=True))
    weight /= weight.sum((0, 2), keepdims=True)
    x = np.asarray(cloud.position, float).reshape(4, 64, NUM_VECTORS, SIZE)
    owner = jala.components["x"][:, 0]
    mean = np.einsum("icn,inck->ck", weight[:, owner], x)
    prior = np.float64(SCALE_TRIL) @ SCALE_TRIL.T
    gain = prior @ np.linalg.inv(prior + params["noise"] ** 2 * np.eye(SIZE))
    expected = params["centre"] + (y - params["centre"]) @ gain.T
    sd = np.sqrt(np.diag(prior - gain @ prior))
    assert np.abs((mean - expected) / sd).max() < 5 / np.sqrt(256 / 4)


@pytest.mark.parametrize("is_traced", [False, True])
def test_the_evidence_of_the_path_is_that_of_all_components(is_traced):
    def means(y):
        with numpyro.plate("groups", len(y)):
            x = numpyro.sample("x", dist.Normal(0.3, 0.8))
            numpyro.sample("y", dist.Normal(x, 1.0), obs=y)

    jala = JALAEM(means, num_islands=4, num_particles=512)
    y = np.float32(0.3 + 1.2 * np.random.default_rng(3).normal(size=NUM_GROUPS))

    def along_the_path(key, y):
        state = jala.init(key, y)
        error = sampler.path_evidence(state.cloud)[1]
        return jala.evaluate(state, y), error

    call = along_the_path if is_traced else lambda key, _: along_the_path(key, y)
    found, error = jax.jit(call)(random.key(1), jnp.asarray(y))
    exact = norm(0.3, np.hypot(0.8, 1.0)).logpdf(y).sum()
    assert abs(float(found) - exact) < 4 * error < 1
