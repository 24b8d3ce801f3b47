import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import resampling
from numpyro_jala.engine.resampling import SCHEMES
from tests.tools import assert_mean

SHARE = np.array([0.32, 0.0, 0.05, 0.4, 0.13, 0.1])


@pytest.fixture(scope="module", params=sorted(SCHEMES))
def drawn(request):
    scheme = jax.jit(jax.vmap(SCHEMES[request.param], (0, None)))
    keys = random.split(random.key(1), 20_000)
    return request.param, np.asarray(scheme(keys, jnp.log(SHARE)))


def counts(ancestors):
    return (ancestors[..., None] == np.arange(6)).sum(-2)


def test_every_particle_is_copied_in_proportion_to_its_weight(drawn):
    _, ancestors = drawn
    for index in (0, 2, 3, 4, 5):
        found = counts(ancestors)[:, index] + 1e-9 * np.arange(len(ancestors))
        assert_mean(found / (6 * SHARE[index]), 1.0, resolution=0.06)


def test_the_dead_are_not_copied_and_ancestors_are_sorted(drawn):
    _, ancestors = drawn
    assert not (ancestors == 1).any()
    assert (np.diff(ancestors, axis=-1) >= 0).all()


def test_schemes_but_multinomial_copy_at_least_the_whole_share(drawn):
    name, ancestors = drawn
    short = (counts(ancestors) < np.floor(6 * SHARE)).any()
    assert short == (name in ("multinomial", "stratified"))


def test_variance_of_the_number_of_copies_orders_the_schemes(drawn):
    name, ancestors = drawn
    fraction = 6 * SHARE[3] % 1
    least = fraction * (1 - fraction)
    most = 6 * SHARE[3] * (1 - SHARE[3])
    variance = counts(ancestors)[:, 3].var()
    if name == "systematic":
        np.testing.assert_allclose(variance, least, rtol=0.05)
    elif name == "multinomial":
        np.testing.assert_allclose(variance, most, rtol=0.05)
    else:
        assert least * 0.95 < variance < most


def test_a_point_on_an_edge_belongs_to_the_living_particle_above_it():
    weight, points = jnp.array([0.0, 0.5, 0.5]), jnp.array([0.0, 0.5, 1.0])
    np.testing.assert_array_equal(resampling._invert(weight, points), [1, 2, 2])


def test_a_single_survivor_takes_all_in_every_scheme():
    log_weight = jnp.full(5, -jnp.inf).at[4].set(-300.0)
    for scheme in SCHEMES.values():
        assert (scheme(random.key(0), log_weight) == 4).all()
