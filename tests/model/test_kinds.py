"""Kinds of models: each is run from the prior to the estimate, against an exact answer.

A model made of independent parts has as its log-evidence the sum of theirs, so that one
run serves several kinds.
"""

import warnings

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import linen, nnx
from jax import random
from jax.scipy.special import betaln, gammaln, logsumexp
from jax.scipy.stats import multivariate_normal, norm, vonmises
from numpyro import handlers
from numpyro.contrib import module
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import constraints, transforms
from numpyro.infer.reparam import ExplicitReparam, LocScaleReparam, TransformReparam

from numpyro_jala import JALAEM
from numpyro_jala.engine.state import EM_STEP
from numpyro_jala.inference import programs
from tests.tools import SCHOOLS


def fit(model, *args, num_steps=100, num_particles=256, **options):
    jala = JALAEM(model, num_particles=num_particles, **options)
    with warnings.catch_warnings():
        # Small clouds doubt themselves; the exact answers below do not.
        warnings.filterwarnings("ignore", "The data hardly determine")
        jala.run(random.key(1), num_steps, *args, progress_bar=False)
    return jala


def shortfall(jala, exact):
    """Nats that a Newton step on the exact log-likelihood would still gain."""
    layout, at = jala._run.fixed.layout, jala._run.result.params

    def free(params):
        return exact(layout.constrain_params(params))

    gradient, hessian = jax.jit(lambda at: (jax.grad(free)(at), jax.hessian(free)(at)))(at)
    return float(-0.5 * gradient @ np.linalg.solve(hessian, gradient))


def assert_right(jala, exact, largest_error=0.1, short=0.01):
    """The evidence is that at the estimate, and the estimate is the maximum."""
    value = float(jax.jit(exact)(jala.params))
    assert jala.log_evidence_se < largest_error
    assert abs(jala.log_evidence - value) < 4 * jala.log_evidence_se + 0.005
    if jala.params:
        assert 0 <= shortfall(jala, exact) < short


def grid(low, high, size=400):
    """Midpoints of a grid, and the logarithm of its spacing."""
    width = (high - low) / size
    return low + width * (jnp.arange(size) + 0.5), jnp.log(width)


def gaussian(y, mean, covariance):
    mean = jnp.broadcast_to(mean, jnp.shape(y)[-1:])
    return multivariate_normal.logpdf(y, mean, covariance).sum()


# -- params -----------------------------------------------------------------------------

MIX = np.array([[1, 0.5], [0, 1], [1, -1], [0.3, 0], [0, 0.2], [1, 1], [-1, 0], [0, -1]])


def constrained_params(y):
    numbers = {
        "share": numpyro.param("share", jnp.ones(3) / 3, constraint=constraints.simplex),
        "order": numpyro.param(
            "order",
            lambda key: jnp.array([0.0, 1.0]),
            constraint=constraints.ordered_vector,
        ),
        "inside": numpyro.param("inside", 0.0, constraint=constraints.interval(-1, 2)),
    }
    with numpyro.plate("two", 2):
        above = numpyro.param(
            "above", jnp.ones(2), event_dim=0, constraint=constraints.greater_than(-3.0)
        )
    spread = numpyro.param("spread", jnp.eye(2), constraint=constraints.positive_definite)
    noise = numpyro.param("noise", 1.0, constraint=constraints.softplus_positive)
    mean = jnp.concatenate([jnp.atleast_1d(v) for v in (*numbers.values(), above)])
    with numpyro.plate("row", len(y)):
        x = numpyro.sample("x", dist.MultivariateNormal(jnp.zeros(2), spread))
        numpyro.sample("y", dist.Normal(mean + x @ MIX.T, noise).to_event(1), obs=y)


def test_params_of_many_constraints_lazy_and_plated():
    rng = np.random.default_rng(5)
    truth = np.array([0.2, 0.5, 0.3, -0.4, 0.9, 0.7, 1.1, -0.6])
    y = truth + rng.normal(size=(20, 2)) @ [[1, 0.4], [0, 0.8]] @ MIX.T
    y = (y + 0.5 * rng.normal(size=y.shape)).astype(np.float32)

    def exact(p):
        parts = (p["share"], p["order"], p["inside"], p["above"])
        mean = jnp.concatenate([jnp.atleast_1d(v) for v in parts])
        covariance = MIX @ p["spread"] @ MIX.T + p["noise"] ** 2 * jnp.eye(8)
        return gaussian(y, mean, covariance)

    jala = fit(constrained_params, y)
    assert_right(jala, exact)
    np.testing.assert_allclose(jala.params["share"].sum(), 1, rtol=1e-5)


CONSTRAINTS = {
    "circular": (constraints.circular, [0.3]),
    "corr_cholesky": (constraints.corr_cholesky, [[1, 0], [0.6, 0.8]]),
    "corr_matrix": (constraints.corr_matrix, [[1, 0.3], [0.3, 1]]),
    "l1_ball": (constraints.l1_ball, [0.2, -0.3]),
    "less_than": (constraints.less_than(2.0), 1.0),
    "lower_cholesky": (constraints.lower_cholesky, [[1, 0], [0.6, 0.8]]),
    "nonnegative": (constraints.nonnegative, 0.7),
    "positive_ordered_vector": (constraints.positive_ordered_vector, [0.2, 1.4]),
    "positive_semidefinite": (constraints.positive_semidefinite, [[2, 0.3], [0.3, 1]]),
    "real_vector": (constraints.real_vector, [2.0, -1.0]),
    "scaled_unit_lower_cholesky": (
        constraints.scaled_unit_lower_cholesky,
        [[1, 0], [0.6, 0.8]],
    ),
    "softplus_lower_cholesky": (constraints.softplus_lower_cholesky, [[1, 0], [0.6, 0.8]]),
    "unit_interval": (constraints.unit_interval, 0.3),
    "zero_sum": (constraints.zero_sum(1), [0.2, 0.3, -0.5]),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_param_of_any_constraint_starts_where_it_says_and_moves_within(name):
    constraint, start = CONSTRAINTS[name]
    start = jnp.asarray(start, jnp.float32)

    def model(y):
        theta = numpyro.param("theta", start, constraint=constraint)
        heights = jnp.arange(1.0, 1 + theta.size) ** 2
        x = numpyro.sample("x", dist.Normal(heights @ theta.ravel(), 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    jala = JALAEM(model, num_particles=16, num_islands=2)
    fixed, arrays, _ = jala._inspect(random.key(0), (SCHOOLS[0],), {})
    layout = fixed.layout
    np.testing.assert_allclose(
        layout.constrain_params(layout.init_params)["theta"], start, atol=1e-6
    )
    moved = layout.constrain_params(layout.init_params + 0.7)["theta"]
    assert bool(jnp.all(constraint(moved))) and float(jnp.abs(moved - start).max()) > 0.01
    slope = jax.jit(jax.grad(layout.joint(arrays)))(layout.init_params, 1.0, jnp.zeros(1))
    assert bool(jnp.isfinite(slope).all()) and float(jnp.abs(slope).max()) > 0


# -- latents ----------------------------------------------------------------------------

COUNTS = np.array([7.0, 2.0, 4.0], np.float32)


def many_supports(y):
    top = numpyro.param("top", 3.0, constraint=constraints.positive)
    centre = numpyro.param("centre", 0.0)
    share = numpyro.sample("share", dist.Dirichlet(jnp.array([1.0, 2.0, 1.5])))
    numpyro.sample("counts", dist.Multinomial(13, share), obs=COUNTS)
    root = numpyro.sample("root", dist.LKJCholesky(2, 1.5))
    numpyro.sample("seen_root", dist.Normal(root[1, 0], 0.3), obs=0.4)
    base = dist.Normal(jnp.array([0.0, -0.5]), 1.0).to_event(1)
    order = numpyro.sample(
        "order", dist.TransformedDistribution(base, transforms.OrderedTransform())
    )
    numpyro.sample("seen_order", dist.Normal(order, 0.5).to_event(1), obs=y[:2])
    angle = numpyro.sample("angle", dist.VonMises(0.5, 1.2))
    numpyro.sample("seen_angle", dist.Normal(angle, 0.8), obs=1.3)
    zero = numpyro.sample("zero", dist.ZeroSumNormal(1.3, (2,)))
    numpyro.sample("seen_zero", dist.Normal(zero, 0.5).to_event(1), obs=y[2:4])
    chance = numpyro.sample("chance", dist.Beta(2.0, 3.0))
    numpyro.sample("hits", dist.Binomial(9, chance), obs=4.0)
    # A support and a prior that depend on params.
    low = numpyro.sample("low", dist.Uniform(0.0, top))
    numpyro.sample("seen_low", dist.Normal(low, 0.5).expand([2]).to_event(1), obs=y[4:])
    x = numpyro.sample("x", dist.Normal(centre, 1.0))
    numpyro.sample("seen_x", dist.Normal(x, 1.0), obs=y[0])
    numpyro.deterministic("doubled", 2 * low)


def many_supports_exact(params, y=SCHOOLS):
    alpha = jnp.array([1.0, 2.0, 1.5])
    total = gammaln(14.0) - gammaln(COUNTS + 1).sum()
    total += gammaln(alpha.sum()) - gammaln(alpha).sum()
    total += gammaln(alpha + COUNTS).sum() - gammaln(alpha.sum() + 13)

    r, width = grid(-1.0, 1.0, 2000)
    prior = 0.5 * jnp.log1p(-(r**2))
    prior -= logsumexp(prior + width)
    total += logsumexp(prior + norm.logpdf(0.4, r, 0.3) + width)

    a, width = grid(-8.0, 8.0, 800)
    first = norm.logpdf(a) + norm.logpdf(y[0], a, 0.5)
    second = norm.logpdf(a, -0.5) + norm.logpdf(y[1], a[:, None] + jnp.exp(a), 0.5)
    total += logsumexp(first + logsumexp(second + width, axis=1) + width)

    angle, width = grid(-jnp.pi, jnp.pi)
    seen = vonmises.logpdf(angle - 0.5, 1.2) + norm.logpdf(1.3, angle, 0.8)
    total += logsumexp(seen + width)

    covariance = 1.3**2 * (jnp.eye(2) - 0.5) + 0.25 * jnp.eye(2)
    total += gaussian(y[2:4], jnp.zeros(2), covariance)
    total += betaln(6.0, 8.0) - betaln(2.0, 3.0) + jnp.log(126.0)

    share, width = grid(0.0, 1.0, 2000)
    low = share * params["top"]
    seen = norm.logpdf(y[4], low, 0.5) + norm.logpdf(y[5], low, 0.5)
    total += logsumexp(seen + width)
    return total + norm.logpdf(y[0], params["centre"], jnp.sqrt(2.0))


def test_latents_of_many_supports_and_priors_that_depend_on_params():
    jala = fit(many_supports, SCHOOLS)
    assert_right(jala, many_supports_exact)
    samples, log_weight = jala.get_weighted_samples()
    weight = np.exp(log_weight)
    alpha = np.array([1.0, 2.0, 1.5]) + COUNTS
    np.testing.assert_allclose(weight @ samples["share"], alpha / alpha.sum(), atol=0.05)
    np.testing.assert_allclose(weight @ samples["chance"], 6 / 14, atol=0.05)
    np.testing.assert_allclose(samples["doubled"], 2 * samples["low"], rtol=1e-5)
    assert (samples["low"] < jala.params["top"]).all()
    assert (np.diff(samples["order"], axis=1) > 0).all()
    assert (np.abs(samples["angle"]) < np.pi).all()


# -- structure --------------------------------------------------------------------------


def structured(y):
    """A scan, a factor, nested plates, scopes, and three reparametrisations."""
    step = numpyro.param("step", 1.0, constraint=constraints.positive)

    def move(level, seen):
        level = numpyro.sample("level", dist.Normal(level, step))
        numpyro.deterministic("double", 2 * level)
        numpyro.sample("seen", dist.Normal(level, 0.8), obs=seen)
        return level, None

    scan(move, 0.0, y)
    spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
    with numpyro.plate("column", 3):
        column = numpyro.sample("column_effect", dist.Normal(0.0, 0.7))
        with numpyro.plate("row", 2):
            cell = numpyro.sample("cell", dist.Normal(column, spread))
            numpyro.sample("table", dist.Normal(cell, 0.5), obs=y.reshape(2, 3))
    handlers.scope(scoped_part, "inner")(y[:2])
    config = {
        "plain": LocScaleReparam(0),
        "moved": TransformReparam(),
        "bent": ExplicitReparam(transforms.SoftplusTransform().inv),
    }
    shift = transforms.AffineTransform(1.0, 2.0)
    with handlers.reparam(config=config):
        plain = numpyro.sample("plain", dist.Normal(0.5, 1.5))
        moved = numpyro.sample("moved", dist.TransformedDistribution(dist.Normal(), shift))
        numpyro.sample("bent", dist.Gamma(3.0, 2.0))
    numpyro.sample("sum", dist.Normal(plain + moved, 1.0), obs=y[3])
    x = numpyro.sample("weighed", dist.Normal(0.0, 1.0))
    numpyro.factor("weight", -0.5 * 3.0 * (x - 1.0) ** 2)


def scoped_part(y):
    mu = numpyro.param("mu", 0.0)
    x = numpyro.sample("x", dist.Normal(mu, 1.0))
    numpyro.sample("y", dist.Normal(x, 0.5).expand([2]).to_event(1), obs=y)


def structured_exact(params, y=SCHOOLS):
    times = jnp.minimum(jnp.arange(1, 7)[:, None], jnp.arange(1, 7))
    total = gaussian(y, jnp.zeros(6), params["step"] ** 2 * times + 0.64 * jnp.eye(6))
    column = jnp.eye(2) * (params["spread"] ** 2 + 0.25) + 0.49
    total += gaussian(y.reshape(2, 3).T, jnp.zeros(2), column)
    total += gaussian(y[:2], params["inner/mu"], jnp.eye(2) * 0.25 + 1)
    total += norm.logpdf(y[3], 1.5, jnp.sqrt(1 + 1.5**2 + 4.0))
    # exp(-3 (x - 1)² / 2) is a normal density but for its constant.
    return (
        total + norm.logpdf(1.0, 0.0, jnp.sqrt(1 + 1 / 3)) + 0.5 * jnp.log(2 * jnp.pi / 3)
    )


def test_scan_plates_scope_factor_deterministic_and_reparametrisations():
    jala = fit(structured, SCHOOLS, num_steps=150)
    assert_right(jala, structured_exact)
    samples, log_weight = jala.get_weighted_samples()
    assert samples["level"].shape == samples["double"].shape == (256, 6)
    np.testing.assert_allclose(samples["double"], 2 * samples["level"], rtol=1e-5)
    np.testing.assert_allclose(samples["plain"], 0.5 + 1.5 * samples["plain_decentered"])
    assert samples["cell"].shape == (256, 2, 3)
    # Without data the posterior is the prior.
    np.testing.assert_allclose(np.exp(log_weight) @ samples["bent"], 1.5, atol=0.3)


def conditioned():
    mu = numpyro.param("mu", 0.0)
    x = numpyro.sample("x", dist.Normal(mu, 1.0))

    def upper(_):
        return numpyro.sample("u", dist.Normal(1.0, 1.0))

    def lower(_):
        return numpyro.sample("u", dist.Normal(-2.0, 0.5))

    u = cond(x > 0.3, upper, lower, None)
    numpyro.sample("y", dist.Normal(u + x, 1.0).expand([6]).to_event(1))


def test_cond_and_condition():
    y = SCHOOLS - 0.5

    def exact(params):
        x, width = grid(-7.0, 7.0, 1401)
        is_up = x > 0.3
        mean, variance = jnp.where(is_up, 1.0, -2.0), jnp.where(is_up, 1.0, 0.25)
        # Of six equal means only the average is uncertain.
        centre, n = y.mean(), y.size
        apart = norm.logpdf(y, centre).sum() - norm.logpdf(0.0, 0.0, n**-0.5)
        seen = norm.logpdf(centre, x + mean, jnp.sqrt(variance + 1 / n)) + apart
        return logsumexp(norm.logpdf(x, params["mu"]) + seen + width)

    model = handlers.condition(conditioned, data={"y": y})
    # No gradient tells of the jump, so the score is noisier than elsewhere.
    assert_right(fit(model, num_particles=512), exact, short=0.05)


MASK = np.array([True, True, False, True, False, True])
RAGGED = np.array([[True, True, False], [True, False, False]])


def masked(y, mask, ragged):
    mu = numpyro.param("mu", 0.0)
    x = numpyro.sample("x", dist.Normal(mu, 1.0))
    imputed = numpyro.sample("y", dist.Normal(x, 1.0).expand([6]), obs=y, obs_mask=mask)
    numpyro.sample("total", dist.Normal(imputed.sum(), 1.0), obs=9.0)
    with numpyro.plate("column", 3), numpyro.plate("row", 2), handlers.mask(mask=ragged):
        z = numpyro.sample("z", dist.Normal(mu, 1.0))
        # What is masked may be anything.
        numpyro.sample(
            "w", dist.Normal(z, 1.0), obs=jnp.where(ragged, y.reshape(2, 3), jnp.nan)
        )


def test_masks_missing_data_and_imputation():
    def exact(params):
        mu = params["mu"]
        # The observed entries, and the total: jointly normal with the common x.
        loading = jnp.array([1.0, 1.0, 1.0, 1.0, 6.0])
        own = jnp.diag(jnp.array([1.0, 1.0, 1.0, 1.0, 7.0]))
        own = own.at[4, :4].set(1.0).at[:4, 4].set(1.0)
        seen = jnp.concatenate([SCHOOLS[MASK], jnp.array([9.0])])
        total = gaussian(seen, mu * loading, jnp.outer(loading, loading) + own)
        return total + norm.logpdf(SCHOOLS.reshape(2, 3)[RAGGED], mu, jnp.sqrt(2.0)).sum()

    jala = fit(masked, SCHOOLS, MASK, RAGGED)
    assert_right(jala, exact)
    samples, _ = jala.get_weighted_samples()
    np.testing.assert_allclose(samples["y"][:, MASK], np.tile(SCHOOLS[MASK], (256, 1)))
    assert samples["y"][:, 2].std() > 0.3 and samples["z"].shape == (256, 2, 3)
    assert jala._run.fixed.layout.dim == 1 + 2 + 3
    # What is held still is not taken for draws that were rounded to one value.
    assert jala._run.tied_draws == {}
    columns = jala._run.fixed.layout.columns()
    assert {name: len(index) for name, index in columns.items()} == {
        "x": 1,
        "y_unobserved": 2,
        "z": 3,
    }


# -- discrete latents -------------------------------------------------------------------


def mixture(y):
    share = numpyro.param("share", 0.5, constraint=constraints.unit_interval)
    centre = numpyro.sample("centre", dist.Normal(jnp.array([0.0, 3.0]), 0.5).to_event(1))
    with numpyro.plate("row", 6):
        which = numpyro.sample("which", dist.Bernoulli(share))
        numpyro.deterministic("mean", centre[which])
        numpyro.sample("y", dist.Normal(centre[which], 0.5), obs=y)


def both_centres(log_likelihood):
    """Integrate over the two centres on a grid."""
    near, width = grid(-3.0, 6.0, 180)
    a, b = near[:, None, None], near[:, None]
    prior = norm.logpdf(a[..., 0], 0.0, 0.5) + norm.logpdf(b[..., 0].T, 3.0, 0.5)
    return logsumexp(prior + log_likelihood(a, b) + 2 * width)


def test_discrete_latents_are_summed_out_and_drawn():
    def log_rows(params, a, b):
        lower = jnp.log1p(-params["share"]) + norm.logpdf(SCHOOLS, a, 0.5)
        upper = jnp.log(params["share"]) + norm.logpdf(SCHOOLS, b, 0.5)
        return lower, upper

    def exact(params):
        return both_centres(lambda a, b: jnp.logaddexp(*log_rows(params, a, b)).sum(-1))

    jala = fit(mixture, SCHOOLS)
    assert_right(jala, exact)
    samples, log_weight = jala.get_weighted_samples()
    weight, centre = np.exp(log_weight), samples["centre"]
    lower, upper = log_rows(jala.params, centre[:, :1], centre[:, 1:])
    expected = weight @ np.asarray(jax.nn.sigmoid(upper - lower))
    np.testing.assert_allclose(weight @ samples["which"], expected, atol=0.12)
    chosen = np.take_along_axis(centre, samples["which"], 1)
    np.testing.assert_allclose(samples["mean"], chosen)
    drawn = jala.predict(random.key(0))
    assert drawn["posterior_predictive"]["y"].shape == (8, 32, 6)


def hidden_markov(y):
    stay = numpyro.param("stay", 0.6, constraint=constraints.unit_interval)
    centre = numpyro.sample("centre", dist.Normal(jnp.array([0.0, 3.0]), 0.5).to_event(1))
    turn = jnp.array([[stay, 1 - stay], [1 - stay, stay]])

    def move(state, seen):
        state = numpyro.sample("state", dist.Categorical(turn[state]))
        numpyro.sample("y", dist.Normal(centre[state], 0.5), obs=seen)
        return state, None

    scan(move, 0, y)


def test_a_hidden_markov_model_is_summed_out():
    def exact(params):
        turn = jnp.array([[params["stay"], 1 - params["stay"]]] * 2)
        turn = jnp.log(turn.at[1].set(turn[1, ::-1]))

        def log_likelihood(a, b):
            shape = jnp.broadcast_shapes(a[..., 0].shape, b[..., 0].T.shape)
            emit = [
                norm.logpdf(SCHOOLS[:, None, None], centre, 0.5)
                for centre in (a[..., 0], b[..., 0].T)
            ]
            forward = [jnp.zeros(shape), jnp.full(shape, -jnp.inf)]
            for t in range(6):
                forward = [
                    jnp.logaddexp(forward[0] + turn[0, k], forward[1] + turn[1, k])
                    + emit[k][t]
                    for k in (0, 1)
                ]
            return jnp.logaddexp(*forward)

        return both_centres(log_likelihood)

    jala = fit(hidden_markov, SCHOOLS)
    assert_right(jala, exact)
    assert set(jala.get_samples()) == {"centre"}
    with pytest.raises(ValueError, match="'state'.*cannot be drawn"):
        jala.predict(random.key(0))


# -- networks ---------------------------------------------------------------------------


def linear_decoder(kind):
    """Return y = z W + b as a module of θ, and its weights and bias as (2, 3) and (3,)."""
    if kind == "linen":
        return lambda: module.flax_module("net", linen.Dense(3), input_shape=(2,)), (
            lambda p: (p["kernel"], p["bias"])
        )
    if kind == "nnx":
        net = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        return lambda: module.nnx_module("net", net), lambda p: (p["kernel"], p["bias"])
    layer = equinox.nn.Linear(2, 3, key=random.key(0))
    return lambda: jax.vmap(module.eqx_module("net", layer)), (
        lambda p: (p.weight.T, p.bias)
    )


@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_a_linear_decoder_is_probabilistic_pca(kind):
    make, weights = linear_decoder(kind)
    rng = np.random.default_rng(0)
    y = rng.normal(size=(8, 2)) @ [[2.0, -1.0, 0.5], [0.3, 1.5, 1.5]]
    y = (y + 0.3 * rng.normal(size=(8, 3)) + 1).astype(np.float32)

    def model(y):
        net = make()
        with numpyro.plate("row", 8):
            z = numpyro.sample("z", dist.Normal().expand([2]).to_event(1))
            numpyro.sample("y", dist.Normal(net(z), 0.7).to_event(1), obs=y)

    jala = fit(model, y, num_particles=512)
    w, b = weights(jala.params["net$params"])
    exact = gaussian(y, b, w.T @ w + 0.49 * jnp.eye(3))
    assert abs(jala.log_evidence - exact) < 4 * jala.log_evidence_se < 0.4
    # At the maximum the mean is the data's, and the largest variances are explained.
    values = np.linalg.eigvalsh(np.cov(y.T, bias=True))
    best = gaussian(y, y.mean(0), np.cov(y.T, bias=True))
    assert values[1] > 0.49 > values[0]
    noise = values[0] / 0.49
    best += 4 * (np.log(noise) + 1 - noise)
    assert best - 0.02 < exact < best + 0.001


def test_priors_on_the_weights_of_a_module():
    x = np.linspace(-1, 2, 6).astype(np.float32)[:, None]

    def model(x, y):
        spread = numpyro.param("spread", 1.0, constraint=constraints.positive)
        prior = {"kernel": dist.Normal(0.0, spread)}
        net = module.random_flax_module("net", linen.Dense(1), prior, input_shape=(1,))
        numpyro.sample("y", dist.Normal(net(x)[:, 0], 1.0), obs=y)

    def exact(params):
        bias = params["net$params"]["bias"]
        covariance = params["spread"] ** 2 * x @ x.T + jnp.eye(6)
        return gaussian(SCHOOLS, bias[0], covariance)

    assert_right(fit(model, x, SCHOOLS), exact)


def test_a_decoder_of_many_weights_trains_without_a_gradient_for_each_particle():
    decoder = linen.Sequential([linen.Dense(256), linen.tanh, linen.Dense(400)])
    rng = np.random.default_rng(0)
    y = np.outer(rng.normal(size=4), np.sin(np.arange(400) / 40)).astype(np.float32)

    def model(y):
        net = module.flax_module("net", decoder, input_shape=(2,))
        with numpyro.plate("image", 4):
            z = numpyro.sample("z", dist.Normal().expand([2]).to_event(1))
            numpyro.sample("y", dist.Normal(net(z), 0.5).to_event(1), obs=y)

    with pytest.warns(UserWarning, match="not converged: over the last 15 steps"):
        jala = fit(model, y, num_steps=60, num_islands=4)
    layout = jala._run.fixed.layout
    assert layout.init_params.size > 100_000
    path = jala.get_extra_fields()["log_evidence"]
    assert path[-1] - path[0] > 100 and np.isfinite(jala.log_evidence)
    assert jala._run.infos(EM_STEP).params.size == 0

    state, run = jala.last_state, jala._run
    run_steps = programs.run_steps.lower(
        run.fixed, run.data, state, EM_STEP, 1, state.target.params, 0
    ).compile()
    used = run_steps.memory_analysis().temp_size_in_bytes
    one_each = 4 * 256 * layout.init_params.size
    activations = 4 * 256 * 4 * (256 + 400)
    assert used < 12 * (activations + 4 * layout.init_params.size) < one_each
