"""The derivatives of a model in all ways agree."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random

from numpyro_jala.engine import evaluation
from numpyro_jala.engine.evaluation import Target
from numpyro_jala.engine.partition import partition
from tests.engine.test_smc import JOINT, PARAMS, SEVERAL, potential_of


@pytest.mark.parametrize("parts", [JOINT, SEVERAL], ids=["one", "several"])
def test_pull_back_of_weights_is_the_weighted_sum_of_scores(parts):
    potential_fn, num_components = potential_of(parts), parts.num_components
    temperature = jnp.array([[0.4, 0.6, 0.5], [1.0, 0.7, 0.2]])[:, :num_components]
    target = Target(PARAMS, temperature)
    position = random.normal(random.key(0), (2, 5, parts.dim))
    weight = random.uniform(random.key(1), (2, num_components, 5))

    @partial(jax.jit, static_argnums=0)
    def evaluate(keeps_scores, target, position):
        at = potential_fn, parts, target, position, keeps_scores
        found, score_fn = evaluation.evaluate_model(*at)
        return found, score_fn(weight)

    (each, several), (pooled, pulled) = (
        evaluate(keeps_scores, target, position) for keeps_scores in (True, False)
    )
    scores = each.scores
    if parts is SEVERAL:  # found apart, where they are needed
        assert (scores == 0).all()
        at = target, position
        scores = jax.jit(lambda *at: evaluation.evaluate_scores(potential_fn, *at)[1])(*at)
        several = jnp.einsum("jcn,jcnp->p", weight, scores)
    assert scores.shape == (2, num_components, 5, 2)
    np.testing.assert_allclose(pulled, several, rtol=1e-5)
    for name in ("potential", "gradient", "slope"):
        np.testing.assert_allclose(
            getattr(each, name), getattr(pooled, name), rtol=1e-5, atol=1e-6
        )
    by_hand = jax.jit(
        jax.grad(
            lambda p: sum(
                weight[j, :, i] @ potential_fn(p, temperature[j], position[j, i])
                for j in range(2)
                for i in range(5)
            )
        )
    )(target.params)
    np.testing.assert_allclose(several, by_hand, rtol=1e-5)
    ones, x = jnp.ones(num_components), position[0, 0]
    slope = potential_fn(jnp.zeros(2), ones, x) - potential_fn(jnp.zeros(2), 0 * ones, x)
    change = potential_fn(PARAMS, ones, x) - potential_fn(PARAMS, 0 * ones, x)
    assert (slope != change).all()
    np.testing.assert_allclose(each.slope[0, :, 0], change, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labels", [[2, 1, 2, 0, 1, 2], [0, 1, 0, 0, 0, 1]])
def test_forward_and_reverse_modes_agree(labels):
    parts = partition(np.array(labels))
    assert parts.has_small_components == (max(parts.sizes) <= 3)
    target = Target(PARAMS, jnp.array([[0.4, 0.9, 0.7]])[:, : parts.num_components])
    position = random.normal(random.key(0), (1, 5, 6))
    at = potential_of(parts), parts, target
    found = jax.jit(lambda x: evaluation.evaluate_model(*at, x, True)[0])(position)

    def total(x):
        return potential_of(parts)(PARAMS, target.temperature[0], x).sum()

    expected = jax.jit(jax.vmap(jax.grad(total)))(position[0])
    np.testing.assert_allclose(found.gradient[0], expected, rtol=1e-5, atol=1e-6)


def test_scores_in_blocks_and_of_many_parameters_are_the_same():
    def many(params, temperature, x):
        terms = jnp.sin(params.sum() * x) + params[:6] * x**2
        return jnp.zeros(3).at[SEVERAL.owner].add(terms)

    position = random.normal(random.key(0), (2, 5, 6))
    params = jnp.linspace(0.1, 0.5, 20)
    target = Target(params, jnp.ones((2, 3)))
    score = jax.jacrev(lambda p, x: many(p, jnp.ones(3), x))
    expected = jax.jit(jax.vmap(jax.vmap(score, (None, 0)), (None, 0)))(params, position)
    scores_of = jax.jit(evaluation.evaluate_scores, static_argnums=(0, 3))
    for block in (None, 2):
        found = scores_of(many, target, position, block)[1]
        np.testing.assert_allclose(
            found, jnp.swapaxes(expected, 1, 2), rtol=1e-4, atol=1e-5
        )
    without = target._replace(params=params[:0])
    none = evaluation.evaluate_scores(
        lambda p, *rest: many(params, *rest), without, position
    )[1]
    assert none.shape == (2, 3, 5, 0)
