"""Small NumPyro models, each with its components written by hand.

Latents are flattened in the order of their names; ``expected`` numbers the component of
each coordinate by first appearance.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import biject_to, constraints
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import _unconstrain_reparam, compute_log_probs

G = np.array([0, 0, 1, 1, 2, 2])  # group of each row, out of three
X = np.array([0.3, -1.2, 0.8, 0.0, 1.5, -0.4], np.float32)
Y = np.array([0, 1, 1, 0, 1, 1])
COUNT = np.array([2, 0, 5, 1, 3, 4])

#: Each entry is a model and the component of each coordinate.
MODELS = {}


def model(expected):
    def register(function):
        MODELS[function.__name__] = (function, expected)
        return function

    return register


def factors_of(function):
    """Return the factors of a model, its params, and an unconstrained position."""
    trace = handlers.trace(handlers.seed(function, 0)).get_trace()
    params = {k: s["value"] for k, s in trace.items() if s["type"] == "param"}
    latents = {
        k: biject_to(s["fn"].support).inv(s["value"])
        for k, s in sorted(trace.items())
        if s["type"] == "sample" and not s["is_observed"]
    }
    position, unravel = ravel_pytree(latents)

    def factors(params, position):
        reparam = partial(_unconstrain_reparam, unravel(position))
        fixed = handlers.substitute(function, data=params)
        fixed = handlers.substitute(fixed, substitute_fn=reparam)
        return compute_log_probs(fixed, (), {}, {}, sum_log_prob=False)[0]

    return factors, params, position


def scale():
    return numpyro.param("scale", 1.3, constraint=constraints.positive)


def intercepts(num_groups=3, name="u"):
    with numpyro.plate(f"{name}_groups", num_groups):
        return numpyro.sample(name, dist.Normal(0, scale()))


def bernoulli(logits, mask=None):
    with numpyro.plate("rows", 6):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=Y, obs_mask=mask)


@model([0, 1, 2])
def random_intercept():
    bernoulli(numpyro.param("beta", 0.5) * X + intercepts()[G])


@model([0, 1, 2, 3])
def group_without_rows():
    bernoulli(intercepts(4)[G])


@model([0, 1, 2])
def non_centred():
    bernoulli(numpyro.param("beta", 0.5) + scale() * intercepts()[G])


@model([0, 1, 2])
def centred_at_a_param():
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(numpyro.param("beta", 0.5), scale()))
    bernoulli(u[G])


@model([0, 1, 2, 3])
def expanded():
    u = numpyro.sample("u", dist.Normal(0, scale()).expand([4]))
    bernoulli(u[G])


@model([0, 0, 0])
def vector_by_to_event():
    u = numpyro.sample("u", dist.Normal(0, scale()).expand([3]).to_event(1))
    bernoulli(u[G])


@model([0, 0, 1, 1, 0, 1])
def nested_plates():
    with numpyro.plate("places", 2, dim=-2):
        b = numpyro.sample("b_place", dist.Normal(0, 1))
        with numpyro.plate("groups", 2, dim=-1):
            a = numpyro.sample("a_group", dist.Normal(b, scale()))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=COUNT[:4].reshape(2, 2))


@model([0, 0, 0, 0, 1, 1, 0, 0, 1, 0, 1])
def observations_in_groups_in_places():
    # Rows 0 to 3 lie in groups 0 and 1 of place 0, rows 4 and 5 in group 2 of place 1.
    parent = np.array([0, 0, 1])
    row = numpyro.sample("a_row", dist.Normal(0, scale()).expand([6]))
    group, place = intercepts(3, "b_group"), intercepts(2, "c_place")
    with numpyro.plate("rows", 6):
        rate = jnp.exp(row + group[G] + place[parent[G]])
        numpyro.sample("y", dist.Poisson(rate), obs=COUNT)


@model([0, 0, 1, 1, 2, 2])
def intercept_and_slope():
    tril = numpyro.param("tril", jnp.eye(2), constraint=constraints.corr_cholesky)
    with numpyro.plate("groups", 3):
        b = numpyro.sample("b", dist.MultivariateNormal(0, scale_tril=scale() * tril))
    bernoulli(b[G, 0] + b[G, 1] * X)


@model([0, 1, 2, 3, 3, 3])
def intercept_and_masked_slope():
    # A slope of a group whose covariates are all zero enters no row.
    b = intercepts(3, "a")
    c = numpyro.sample("c", dist.Normal(0, 1).expand([3]).to_event(1))
    bernoulli(b[G] + c[G] * np.zeros(6, np.float32))


@model([0, 0, 0, 0, 0])
def crossed():
    second = np.array([0, 1, 0, 1, 1, 0])
    bernoulli(intercepts(3, "a")[G] + intercepts(2, "b")[second])


@model([0, 1, 1, 0, 0, 1])
def crossed_in_two_blocks():
    first, second = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 2, 2, 2, 2])
    bernoulli(intercepts(3, "a")[first] + intercepts(3, "b")[second])


@model([0, 1, 2])
def indicator_matrix():
    bernoulli(jnp.eye(3)[G] @ intercepts())


@model([0, 1, 2])
def numpy_indicator_matrix_on_the_right():
    bernoulli(intercepts() @ np.eye(3, dtype=np.float32)[:, G])


@model([0, 1, 2])
def one_hot_einsum():
    bernoulli(jnp.einsum("ng,g->n", jax.nn.one_hot(G, 3), intercepts()))


@model([0, 1, 2])
def scaled_indicator_matrix():
    bernoulli((scale() * np.eye(3, dtype=np.float32)[G]) @ intercepts())


@model([0, 1, 2])
def taken():
    bernoulli(jnp.take(intercepts(), G, axis=0))


@model([0, 0, 1, 1])
def dirichlet_by_group():
    counts = np.array([[1, 2, 3], [4, 0, 1]])
    with numpyro.plate("groups", 2):
        p = numpyro.sample("p", dist.Dirichlet(scale() * jnp.ones(3)))
        numpyro.sample(
            "y", dist.Multinomial(probs=p, total_count=counts.sum(1)), obs=counts
        )


@model([0, 1, 2, 3, 4, 5])
def beta_binomial():
    with numpyro.plate("rows", 6):
        p = numpyro.sample("p", dist.Beta(scale(), 2.0))
        numpyro.sample("y", dist.Binomial(6, p), obs=COUNT)


@model([0, 1, 2])
def reparametrised():
    with handlers.reparam(config={"u": LocScaleReparam(0)}):
        u = intercepts()
    bernoulli(u[G])


@model([0, 1, 1])
def masked_rows():
    # The last two rows link groups 1 and 2; row 0 would link 0 and 1 but is masked.
    u, other = intercepts(), np.array([1, 0, 1, 1, 1, 1])
    with handlers.mask(mask=np.array([False, True, True, True, True, True])):
        bernoulli(u[G] + u[other])


@model([0, 1, 2])
def masked_observations():
    u, other = intercepts(), np.array([0, 0, 1, 1, 2, 0])
    with numpyro.plate("rows", 6), handlers.mask(mask=np.arange(6) < 5):
        numpyro.sample("y", dist.Normal(u[G] + u[other], 1.0), obs=X)


@model([0, 1, 2, 3, 4])
def missing_observation():
    # Row 0 is missing and row 1 seen, so the latent values a are linked to nothing.
    u = intercepts()
    with numpyro.plate("rows", 2):
        mean = u[np.array([0, 1])]
        seen = np.array([False, True])
        value = jnp.where(seen, 0.7, numpyro.sample("a", dist.Normal(0, 1).expand([2])))
        numpyro.factor("y", jnp.where(seen, dist.Normal(mean, 1.0).log_prob(value), 0))


@model([0, 0, 0])
def factor_of_the_sum():
    numpyro.factor("total", -(intercepts().sum() ** 2))


@model([0, 1, 2])
def factor_by_group():
    numpyro.factor("each", -(intercepts() ** 4))


@model([0, 0, 0, 0])
def scanned_random_walk():
    def step(previous, count):
        new = numpyro.sample("x", dist.Normal(previous, scale()))
        numpyro.sample("y", dist.Poisson(jnp.exp(new)), obs=count)
        return new, None

    scan(step, 0.0, COUNT[:4])


@model([0, 1, 2, 3])
def scanned_groups():
    def step(carry, count):
        new = numpyro.sample("x", dist.Normal(0.0, scale()))
        numpyro.sample("y", dist.Poisson(jnp.exp(new)), obs=count)
        return carry, None

    scan(step, None, COUNT[:4])


@model([0, 1, 0, 1, 0, 1, 0, 1])
def scanned_random_walks_of_two_groups():
    def step(previous, count):
        with numpyro.plate("groups", 2):
            new = numpyro.sample("x", dist.Normal(previous, scale()))
            numpyro.sample("y", dist.Poisson(jnp.exp(new)), obs=count)
        return new, None

    scan(step, jnp.zeros(2), COUNT[:4, None] + np.arange(2))


@model([0, 1, 0])
def branch_on_a_param():
    u = intercepts()
    flipped = jax.lax.cond(scale() > 1, lambda x: x, lambda x: x[::-1], u)
    numpyro.factor("f", -(flipped**2))


@model([0, 1, 1])
def where_with_a_data_mask():
    u, seen = intercepts(), np.array([True, True, False])
    numpyro.factor("f", jnp.where(seen, u, u * u[1]))


@model([0, 0, 0, 0])
def shared_latent():
    shared = numpyro.sample("a", dist.Normal(0, 1))
    bernoulli(shared + intercepts()[G])


@model([0, 0, 0, 0])
def latent_scale():
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 3):
        u = numpyro.sample("u", dist.Normal(0, tau))
    bernoulli(u[G])


@model([0, 0, 0, 0])
def gaussian_random_walk():
    x = numpyro.sample("x", dist.GaussianRandomWalk(scale(), 4))
    numpyro.sample("y", dist.Poisson(jnp.exp(x)).to_event(1), obs=COUNT[:4])


@model([0, 0, 1, 1, 2, 2])
def random_walk_by_group():
    with numpyro.plate("groups", 3):
        x = numpyro.sample("x", dist.GaussianRandomWalk(scale(), 2))
    numpyro.sample("y", dist.Poisson(jnp.exp(x)), obs=COUNT.reshape(3, 2))


@model([0, 1, 2])
def zero_inflated():
    rate = jnp.exp(intercepts()[G])
    with numpyro.plate("rows", 6):
        numpyro.sample("y", dist.ZeroInflatedPoisson(0.3, rate), obs=COUNT)


@model([0, 1, 2])
def ordered_logistic():
    cuts = numpyro.param("cuts", jnp.array([-1.0, 0.5, 2.0]))
    predictor = intercepts()[G]
    with numpyro.plate("rows", 6):
        numpyro.sample("y", dist.OrderedLogistic(predictor, cuts), obs=COUNT % 4)


@model([0, 0, 0, 1, 2, 3])
def ordered_logistic_with_latent_cuts():
    # The cuts are one component; no row is observed, so nothing ties them to groups.
    numpyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    intercepts()


@model([0, 1, 2])
def segment_sums():
    u = intercepts()
    total = jax.ops.segment_sum(jnp.sin(u[G]) * X, G, num_segments=3)
    numpyro.factor("f", total)


@model([0, 1, 2])
def vmapped_likelihood():
    def row(u, x, y):
        return dist.Bernoulli(logits=u + x).log_prob(y)

    numpyro.factor("f", jax.vmap(row)(intercepts()[G], X, Y))


@model([0, 1, 2])
def unused_deterministic():
    u = intercepts()
    numpyro.deterministic("total", u.sum())
    bernoulli(u[G])


@model([0, 0, 1, 1])
def mixture_by_group():
    weights = numpyro.param("weights", jnp.array([0.4, 0.6]))
    with numpyro.plate("groups", 2):
        u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
        parts = dist.Normal(u, 1.0)
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(weights), parts), obs=X[:2]
        )


@model([0, 0, 1, 1, 2, 2])
def correlated_rows_by_group():
    # A multivariate normal of the two rows of each group, its covariance from params.
    u = numpyro.sample("u", dist.Normal(0, 1).expand([3, 2]))
    covariance = scale() * jnp.eye(2) + 0.3
    with numpyro.plate("groups", 3):
        y = dist.MultivariateNormal(u, covariance_matrix=covariance)
        numpyro.sample("y", y, obs=X.reshape(3, 2))
