"""Score, information and standard errors, on a model whose likelihood is known."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.stats import norm

from numpyro_jala.engine import flow
from numpyro_jala.engine.partition import joint, partition
from numpyro_jala.engine.weights import normalise
from numpyro_jala.inference import information
from numpyro_jala.inference.information import (
    Information,
    Moments,
    Question,
    Uncertainty,
    combine,
    influence,
)
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once
from numpyro_jala.results.estimates import estimates
from tests.tools import SCHOOLS, assert_mean

ALL = joint(6)
PARAMS = jnp.array([0.7, 0.3])  # mu and the logarithm of tau, away from the maximum
#: Of two params and no latents.
MOTION = np.zeros((2, 0))


def log_likelihood(params, error=1.0):
    sd = jnp.sqrt(error**2 + jnp.exp(2 * params[1]))
    return jnp.sum(dist.Normal(params[0], sd).log_prob(SCHOOLS))


def terms(params, x, error=1.0):
    """Potentials of the six latents, which are independent given the params."""
    mu, log_tau = params
    prior = dist.Normal(mu, jnp.exp(log_tau)).log_prob(x)
    return -(prior + dist.Normal(x, error).log_prob(SCHOOLS))


def potential(params, temperature, x, error=1.0):
    return jnp.sum(terms(params, x, error))[None]


def bent(params, temperature, y):
    """The same latents seen through a bent scale, and mixed with each other."""
    x = jnp.cumsum(y + 0.3 * jnp.sinh(y))
    return potential(params, temperature, x) - jnp.sum(jnp.log(1 + 0.3 * jnp.cosh(y)))


#: The latents in components of three, two and one, in another order.
SEVERAL = partition(np.array([1, 0, 1, 2, 0, 1]))


def mixing():
    """Sums of the latents up to each, in its component, and differences: the inverse."""
    same = SEVERAL.owner[:, None] == SEVERAL.owner
    sums = np.tril(same).astype(np.float32)
    return sums, np.linalg.inv(sums)


def by_component(values):
    return jnp.zeros(3).at[SEVERAL.owner].add(values)


def apart(params, temperature, y, error=1.0):
    """The same latents, mixed with those of their component."""
    return by_component(terms(params, jnp.asarray(mixing()[0]) @ y, error))


def bent_apart(params, temperature, y):
    """The same seen through a bent scale."""
    stretch = jnp.log(1 + 0.3 * jnp.cosh(y))
    return apart(params, temperature, y + 0.3 * jnp.sinh(y)) - by_component(stretch)


def exact_draws(num_islands, num_particles, error=1.0):
    mu, variance = PARAMS[0], jnp.exp(2 * PARAMS[1])
    shrink = variance / (error**2 + variance)
    noise = random.normal(random.key(0), (num_islands, num_particles, 6))
    return mu + shrink * (SCHOOLS - mu) + error * jnp.sqrt(shrink) * noise


def bent_draws(num_islands, num_particles, parts=ALL):
    draws = exact_draws(num_islands, num_particles)
    steps = jnp.diff(draws, axis=-1, prepend=0.0)
    steps = steps if parts.is_joint else draws @ mixing()[1].T

    def improve(_, found):  # Newton's iterations for the inverse of the bend
        return found - (found + 0.3 * jnp.sinh(found) - steps) / (1 + 0.3 * jnp.cosh(found))

    return jax.lax.fori_loop(0, 30, improve, steps)


def asked(potential_fn, parts, dense, follows=True):
    most_dense = 256 if dense else 0
    return Question(potential_fn, parts, PARAMS, most_dense, jnp.asarray(follows))


def informed(potential_fn, position, dense, follows=True, parts=ALL):
    num_islands, num_particles, _ = position.shape
    # Unequal weights that are right: half the particles, and the other half twice.
    pattern = jnp.array([[1.0, 0.0, 0.5, 0.5], [0.5, 1.0, 0.0, 0.5], [0.0, 0.5, 1.0, 0.5]])
    weight = jnp.tile(pattern[: parts.num_components], num_particles // 4)
    weight = jnp.tile(weight / weight.sum(-1, keepdims=True), (num_islands, 1, 1))
    return combined(asked(potential_fn, parts, dense, follows), weight, position)


def combined(question, *rows):
    moments = jax.jit(lambda *rows: information.moments(question, *rows))
    return information.combine([moments(*rows)])


ERROR = jnp.array([0.4, 1.0, 2.0, 0.6, 1.5, 0.8])


@pytest.mark.parametrize("parts", [ALL, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("dense", [True, False])
def test_of_a_gaussian_posterior_the_score_is_exact(dense, parts):
    draws = exact_draws(4, 16, ERROR)
    if dense and parts is ALL:  # latents that sum to the old ones are correlated
        draws = jnp.diff(draws, axis=-1, prepend=0.0)
    elif dense:
        draws = draws @ mixing()[1].T

    def potential_fn(params, temperature, y):
        if parts is SEVERAL:
            mixed = apart(params, temperature, y, ERROR)
            return mixed if dense else by_component(terms(params, y, ERROR))
        x = jnp.cumsum(y) if dense else y
        return potential(params, temperature, x, ERROR)

    found = informed(potential_fn, draws, dense, parts=parts)
    exact = np.asarray(jax.jit(jax.hessian(log_likelihood))(PARAMS, ERROR))
    assert (found.observed_se < 0.8).all()
    assert (np.abs(found.observed + exact) < 5 * found.observed_se + 1e-3).all()
    score = -np.asarray(jax.grad(log_likelihood)(PARAMS, ERROR))
    np.testing.assert_allclose(found.score, score, rtol=2e-3, atol=2e-3)
    assert found.score_noise.max() < 1e-5


@pytest.mark.parametrize("parts", [ALL, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("dense", [True, False])
def test_louis_finds_the_score_and_the_information_of_the_likelihood(dense, parts):
    potential_fn = bent if parts is ALL else bent_apart
    found = informed(potential_fn, bent_draws(16, 2_000, parts), dense, parts=parts)
    exact = np.asarray(jax.jit(jax.hessian(log_likelihood))(PARAMS))
    assert (found.observed_se > 1e-3).all() and (found.observed_se < 0.15).all()
    assert (np.abs(found.observed + exact) < 4.5 * found.observed_se).all()
    score = -np.asarray(jax.grad(log_likelihood)(PARAMS))
    error = np.sqrt(np.diag(found.score_noise))
    assert (np.abs(found.score - score) < 4.5 * error).all() and (error < 0.05).all()


def test_particles_that_follow_know_more():
    draws = exact_draws(16, 200)
    following, plain = (informed(potential, draws, True, each) for each in (True, False))
    assert (following.observed_se < 0.5 * plain.observed_se).all()
    assert information.is_quieter(following, plain)
    assert not information.is_quieter(plain, following)


@pytest.mark.parametrize("num_components", [1, 2])
def test_an_island_follows_as_the_others_say(num_components):
    # All coordinates as one component, or three each.
    split = joint(6) if num_components == 1 else partition(np.arange(6) // 3)
    (position,) = split.split(exact_draws(4, 16))
    weight = jnp.full((4, num_components, 16), 1 / 16)
    gradient = (position - 1.0) * ERROR.reshape(num_components, 1, -1)
    gradient = gradient + 0.1 * jnp.sin(position)
    change = 0.5 * gradient + 0.1 * position**2
    for dense in (True, False):

        @jax.jit
        def learned(x, g, c, dense=dense):
            frame = flow.frame(
                weight, x, g, np.zeros((x.shape[1], x.shape[3])), 256 if dense else 0
            )
            return jax.tree.leaves((frame[:3], flow.follow(frame, weight, x, c)))

        before = learned(position, gradient, change)
        after = learned(*(v.at[2].multiply(3.0) for v in (position, gradient, change**2)))
        also = learned(position, gradient, change**2)
        for one, two, three in zip(before, after, also, strict=True):
            np.testing.assert_allclose(two[2], three[2], rtol=2e-3, atol=2e-3)
            assert not np.allclose(two[1], one[1], rtol=0.01)


@pytest.mark.parametrize("most_dense", [8, 0])
def test_components_follow_as_each_would_alone(most_dense):
    parts = partition(np.array([1, 0, 1, 2, 0, 1, 0]))  # of three, three and one
    keys = random.split(random.key(0), 4)
    position = 1.0 + random.normal(keys[0], (4, 30, 7))
    weight = normalise(random.normal(keys[1], (4, 3, 30)))
    root = jnp.eye(7) + 0.3 * random.normal(keys[2], (7, 7))
    gradient = (position - 0.5) @ (root @ root.T) + 0.1 * position**2
    change = gradient[..., ::-1] + 0.3 * position**2

    @partial(jax.jit, static_argnums=4)
    def learned(weight, position, gradient, change, parts):
        found, rates = [], []
        rows = (parts.split(values) for values in (position, gradient, change))
        for w, x, g, c in zip(parts.of_block(weight), *rows, strict=True):
            padding = jnp.all(x == 0, (0, 2)).astype(x.dtype)
            frame = flow.frame(w, x, g, padding, most_dense)
            flows = flow.follow(frame, w, x, c)
            found.append(flow.displace(frame, flows, x))
            rates.append(flow.rate(frame, flows, x, g))
        return parts.join(found), jnp.concatenate(rates, 1)

    together, rates = learned(weight, position, gradient, change, parts)
    for owner in range(3):
        mine = parts.owner == owner
        rows = (values[..., mine] for values in (position, gradient, change))
        alone, rate = learned(weight[:, owner, None], *rows, joint(int(mine.sum())))
        np.testing.assert_allclose(together[..., mine], alone, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(rates[:, owner], rate[:, 0], rtol=1e-3, atol=2e-3)


def test_padding_follows_nothing():
    parts = partition(np.array([0, 1, 0, 1, 1, 1]))  # of two and of four, in one block
    keys = random.split(random.key(0), 3)
    position = 1.0 + random.normal(keys[0], (4, 30, 6))
    weight = normalise(random.normal(keys[1], (4, 2, 30)))
    gradient = (position - 0.5) * jnp.linspace(0.5, 2.0, 6) + 0.1 * position**2
    change = 0.5 * gradient + 0.3 * position**2
    (x,), (g,), (c,) = (parts.split(values) for values in (position, gradient, change))
    for most_dense in (8, 0):
        learn = jax.jit(partial(_learn_flow, most_dense=most_dense))
        displaced, rate, volume = learn(weight, x, g, c)
        assert (displaced[:, 0, :, 2:] == 0).all()
        alone = learn(weight[:, :1], x[:, :1, :, :2], g[:, :1, :, :2], c[:, :1, :, :2])
        np.testing.assert_allclose(displaced[:, :1, :, :2], alone[0], rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(rate[:, :1], alone[1], rtol=1e-3, atol=1e-3)
        other = learn(weight[:, 1:], x[:, 1:], g[:, 1:], c[:, 1:])
        np.testing.assert_allclose(volume, alone[2] + other[2], rtol=1e-3)


def _learn_flow(weight, x, gradient, change, most_dense):
    padding = jnp.all(x == 0, (0, 2)).astype(x.dtype)
    frame = flow.frame(weight, x, gradient, padding, most_dense)
    found = flow.follow(frame, weight, x, change)
    pair = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), found)
    volume = flow.volume_curvature(pair)
    return flow.displace(frame, found, x), flow.rate(frame, found, x, gradient), volume


def test_a_dead_island_says_nothing():
    position = exact_draws(4, 16)
    weight = jnp.full((4, 1, 16), 1 / 16).at[3].set(0.0)
    question = asked(potential, ALL, dense=True)
    found = combined(question, weight, position)
    alone = combined(question, weight[:3], position[:3])
    np.testing.assert_allclose(found.score, alone.score, rtol=1e-4)
    np.testing.assert_allclose(found.observed, alone.observed, rtol=1e-3)


def test_a_newton_step_leaves_out_its_noise():
    cov = np.array([[0.5, 0.1], [0.1, 0.2]])
    known = Uncertainty(cov, np.ones(2, bool), np.zeros(2), 0.0, np.zeros(2))
    noise = np.diag([0.4, 0.3])
    info = Information(np.array([2.0, 1.0]), noise, np.linalg.inv(cov)[None])
    share = 1 - (0.4 * 0.5 + 0.3 * 0.2) / (np.array([2.0, 1.0]) @ cov @ [2.0, 1.0])
    expected = -share * cov @ [2.0, 1.0]
    np.testing.assert_allclose(information.newton_step(info, known), expected)
    loud = info._replace(score_noise=100 * noise)
    np.testing.assert_allclose(information.newton_step(loud, known), 0.0)


def test_the_shortfall_of_a_displaced_estimate_is_right():
    found = information.invert(
        informed(bent, bent_draws(16, 2_000), True), np.array([True, False])
    )
    maximum = norm(SCHOOLS.mean(), SCHOOLS.std()).logpdf(SCHOOLS).sum()
    shortfall = maximum - float(log_likelihood(PARAMS))
    assert 0.1 < shortfall < 2 and 0.5 < found.shortfall / shortfall < 2
    inverse = np.linalg.inv(-np.asarray(jax.hessian(log_likelihood)(PARAMS)))
    np.testing.assert_allclose(found.covariance, inverse, rtol=0.1, atol=0.01)


def test_the_error_of_a_standard_error_is_its_spread():
    """Where params are nearly collinear and islands disagree about their common part."""
    rng = np.random.default_rng(2)
    exact, shape = np.array([[4.0, 3.6], [3.6, 3.5]]), np.array([[1.0, 0.9], [0.9, 0.9]])
    errors, said = [], []
    for _ in range(400):
        each = exact + 0.02 * rng.normal(size=(8, 1, 1)) * shape
        info = Information(np.zeros(2), np.eye(2), each)
        found = information.invert(info, np.ones(2, bool))
        errors.append(np.sqrt(np.diag(found.covariance)))
        said.append(found.error)
    spread = np.std(errors, 0) / np.mean(errors, 0)
    # Of eight islands the spread is low by a factor of 0.965, and 400 tell to 4 %.
    np.testing.assert_allclose(np.mean(said, 0) / 0.965, spread, rtol=0.16)


def test_what_the_data_do_not_determine_is_left_out():
    observed = np.array([[4.0, 0.1, 1.0], [0.1, 0.4, 0.0], [1.0, 0.0, 2.0]])
    score = np.array([1.0, 3.0, 0.0])
    none = np.zeros((3, 3))
    info = Information(score, none, np.stack([observed, observed]))
    found = information.invert(info, np.array([True, False, False]))
    np.testing.assert_array_equal(found.determined, [True, False, True])
    inverse = np.linalg.inv(observed[::2, ::2])
    np.testing.assert_allclose(found.covariance[::2, ::2], inverse)
    assert np.isnan(found.covariance[1]).all()
    # The second could gain as much as a curvature of one half, the least, allows.
    np.testing.assert_allclose(found.newton_decrement, [0.0, 3.0**2, 0.0])
    np.testing.assert_allclose(found.shortfall, 0.5 * inverse[0, 0] + 9.0)
    noisy = info._replace(score_noise=np.diag([0.0, 2.0, 0.0]))
    assert (
        information.invert(noisy, np.array([True, False, False])).newton_decrement == 0
    ).all()
    flat = Information(score[:2], none[:2, :2], np.ones((1, 2, 2)))
    assert information.invert(flat, np.ones(2, bool)).determined.sum() == 1


@pytest.mark.parametrize(("gain", "known"), [(0.1, 1), (1.0, 2)])
def test_a_combination_of_which_there_is_only_noise_is_left_out(gain, known):
    """Where three islands of noise 0.3 tell of 0.1, or of 1, on a scale of hundreds."""
    common, other = np.array([20.0, 10.0]), np.array([-1.0, 2.0])
    each = [
        np.outer(common, common) + (gain + e) * np.outer(other, other)
        for e in (-0.3, 0, 0.3)
    ]
    info = Information(np.zeros(2), np.eye(2), np.stack(each))
    found = information.invert(info, np.ones(2, bool))
    assert found.determined.sum() == known
    inverse = (
        np.linalg.inv(info.observed) if known == 2 else np.diag(1 / np.diag(info.observed))
    )
    kept = np.ix_(found.determined, found.determined)
    np.testing.assert_allclose(found.covariance[kept], inverse[kept])


def laid_out(model, *args):
    trace = run_once(model, random.key(0), args, {})
    return lay_out(model, trace, args, {})


def test_errors_and_intervals_go_through_the_constraint():
    def model(y):
        numpyro.param("a", 2.0)
        numpyro.param("b", 3.0, constraint=constraints.positive)
        numpyro.param("c", jnp.array([0.2, 0.3, 0.5]), constraint=constraints.simplex)
        numpyro.sample("x", dist.Normal())
        numpyro.sample("y", dist.Normal(), obs=y)

    layout = laid_out(model, np.float32(1.0))
    cov = np.array([[0.04, 0.01, 0, 0], [0.01, 0.09, 0, 0], [0, 0, 1, 0.2], [0, 0, 0.2, 1]])
    known = Uncertainty(cov, np.ones(4, bool), np.zeros(4), 0.0, np.zeros(4))
    found = estimates(layout, layout.init_params, known, 0.9)
    z = norm.ppf(0.95)
    np.testing.assert_allclose(found["a"], [2, 0.2, 2 - 0.2 * z, 2 + 0.2 * z], rtol=1e-5)
    ends = 3 * np.exp([-0.3 * z, 0.3 * z])
    np.testing.assert_allclose(found["b"], [3, 0.9, *ends], rtol=1e-5)
    simplex = lambda v: numpyro.distributions.transforms.biject_to(  # noqa: E731
        constraints.simplex
    )(v)
    start = layout.unravel_params(layout.init_params)["c"]
    jacobian = np.asarray(jax.jacfwd(simplex)(start))
    errors = np.sqrt(np.diag(jacobian @ cov[2:, 2:] @ jacobian.T))
    np.testing.assert_allclose(found["c"].standard_error, errors, rtol=1e-4)
    # So close to the edge of its support that no slope is left in a float.
    edge = layout.init_params.at[1].set(-95.0)
    lost = Uncertainty(
        cov, np.array([True, False, True, True]), np.zeros(4), 0.0, np.zeros(4)
    )
    assert np.isnan(estimates(layout, edge, lost, 0.9)["b"].standard_error)
    unknown = Uncertainty(
        cov, np.array([True, False, True, True]), np.zeros(4), 0.0, np.zeros(4)
    )
    part = estimates(layout, layout.init_params, unknown, 0.9)
    assert np.isnan(part["b"].standard_error) and np.isfinite(part["c"].low).all()


def test_a_run_reports_the_standard_errors_of_the_exact_likelihood(means, capsys):
    best = jnp.array([SCHOOLS.mean(), 0.5 * jnp.log(SCHOOLS.var() - 1)])
    cov = np.linalg.inv(-np.asarray(jax.hessian(log_likelihood)(best), float))
    errors = means.standard_errors()
    np.testing.assert_allclose(errors["mu"], np.sqrt(cov[0, 0]), rtol=0.05)
    tau = float(jnp.exp(best[1]))
    np.testing.assert_allclose(errors["tau"], tau * np.sqrt(cov[1, 1]), rtol=0.1)
    low, high = means.confidence_intervals(0.8)["tau"]
    z = norm.ppf(0.9) * errors["tau"] / means.params["tau"]
    np.testing.assert_allclose(
        [low, high], means.params["tau"] * np.exp([-z, z]), rtol=1e-3
    )
    assert list(means.covariance().columns) == ["mu", "tau"]
    stored = means.to_inference_data()["estimate"]["tau"]
    np.testing.assert_allclose(stored.sel(statistic="se"), errors["tau"])
    np.testing.assert_allclose(stored.sel(statistic="estimate"), means.params["tau"])
    np.testing.assert_allclose(np.diag(means.correlation()), 1)
    means.print_summary()
    text = capsys.readouterr().out
    assert f"{float(errors['mu']):10.4f}" in text


def test_a_standard_deviation_at_zero_is_said_and_leaves_no_nan(compiled_means, capsys):
    y = np.array([0.9, 1.0, 1.2, 0.8, 1.1, 1.0], np.float32)  # less than unit noise gives
    jala = compiled_means
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jala.run(random.key(0), 150, y, progress_bar=False)
    assert any("hardly determine tau" in str(warning.message) for warning in caught)
    jala.print_summary()
    assert "nan" not in capsys.readouterr().out
    np.testing.assert_allclose(jala.standard_errors()["mu"], np.sqrt(1 / 6), rtol=0.05)
    maximum = norm(y.mean(), 1).logpdf(y).sum()
    assert abs(jala.log_evidence - maximum) < 4 * jala.log_evidence_se + 0.05


@pytest.mark.parametrize("num_components", [1, 3])
def test_the_information_of_few_particles_is_unbiased(num_components):
    rng = np.random.default_rng(0)
    num_runs, num_islands, num_particles = 4_000, 4, 4
    root = rng.normal(size=(num_components, 2, 2))
    shape = (num_runs, num_islands, num_components, num_particles, 2)
    scores = 1.0 + np.einsum("cpq,rjcnq->rjcnp", root, rng.normal(size=shape))
    outer = np.einsum("rjcnp,rjcnq->rjpq", scores, scores) / num_particles
    curvature = np.full((num_islands, 2, 2), 7.0)
    found = [
        combine([Moments(each.mean(2), squares, curvature, MOTION)])
        for each, squares in zip(scores, outer, strict=True)
    ]
    covariance = np.einsum("cpq,crq->pr", root, root)
    for p, q in ((0, 0), (0, 1), (1, 1)):
        size = np.sqrt(covariance[p, p] * covariance[q, q])
        observed = np.array([each.observed[p, q] for each in found])
        expected = (7.0 - covariance[p, q]) / size
        assert_mean(observed / size, expected, resolution=0.05)
        noise = np.array([each.score_noise[p, q] for each in found]) / size
        share = covariance[p, q] / size / (num_islands * num_particles)
        assert_mean(noise, share, resolution=0.01)
    score = [each.score[0] for each in found]
    assert_mean(score, num_components, resolution=0.1)


def test_islands_without_finite_moments_are_left_out():
    rng = np.random.default_rng(0)
    moments = Moments(*(rng.normal(size=(4, count, 2)) for count in (3, 2, 2)), MOTION)
    broken = moments._replace(curvature=moments.curvature.copy())
    broken.curvature[1] = np.inf
    kept = Moments(*(np.delete(part, 1, axis=0) for part in moments[:3]), MOTION)
    for found, expected in zip(combine([broken])[:4], combine([kept])[:4], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    broken.curvature[:] = np.nan
    *numbers, by_component, _ = combine([broken])
    assert all(np.isnan(part).all() for part in numbers)
    exact = moments.score.astype(by_component.dtype)  # needs no second derivative
    np.testing.assert_array_equal(by_component, exact)
    broken.score[:, 1] = np.nan
    assert combine([broken]).by_component is None


def test_the_noise_of_scores_does_not_add_to_influences():
    """Of three noisy scores each, of five thousand components."""
    rng = np.random.default_rng(4)
    score = rng.gamma(2.0, 0.1, (5_000, 2)) - 0.1
    covariance = np.array([[2.0, -0.7], [-0.7, 1.0]])
    noisy = score + rng.normal(0.0, 0.3, (3, *score.shape))
    exact = np.einsum("cp,pq,cq->c", score, covariance, score)
    assert_mean(influence(noisy, covariance) - exact, 0.0, resolution=0.03)
    np.testing.assert_allclose(influence(score[None], covariance), exact)
    held = np.array([[2.0, np.nan], [np.nan, np.nan]])  # the second is held fixed
    np.testing.assert_allclose(influence(score[None], held), 2 * score[:, 0] ** 2)


def test_scores_give_a_covariance_where_they_tell_params_apart():
    rng = np.random.default_rng(5)
    score = rng.gamma(2.0, 1.0, (3, 200, 2)) @ np.array([[1.0, 0.4], [0.0, 0.5]])
    nan = np.full((2, 2), np.nan)
    info = Information(nan[0], nan, nan[None], score)
    mean = score.mean(0)
    expected = np.linalg.inv(sum(np.outer(row, row) for row in mean))
    np.testing.assert_allclose(information.from_scores(info), expected)
    assert information.from_scores(info._replace(by_component=None)) is None
    alike = score[..., [0, 0]]
    assert information.from_scores(info._replace(by_component=alike)) is None
    faint = score * np.array([1.0, 1e-3])
    assert information.from_scores(info._replace(by_component=faint)) is None


@pytest.mark.parametrize(
    ("other", "error", "biased"),
    [(1.2, 0.01, True), (1.2, 0.1, False), (1.04, 1e-3, False)],
)
def test_second_derivatives_are_biased_beyond_noise_and_beyond_a_share(
    other, error, biased
):
    nan = np.full((2, 2), np.nan)
    first, second = (
        # Of two islands each, e above and below: their mean has error e.
        Information(nan[0], nan, np.stack([np.diag([3.0, x]) - e, np.diag([3.0, x]) + e]))
        for x, e in ((1.0, 0.01), (other, error))
    )
    assert information.is_biased(first, second) == biased
