"""Models whose discrete latents are summed out, and the components that they have.

Each takes no data. Groups are columns, rows of a group lie along the first axis.
"""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.distributions import constraints

GROUPS, ROWS, TIMES = 4, 3, 5
COUNTS = np.array([[0, 3, 1, 0], [2, 0, 0, 5], [1, 4, 0, 2]], np.float32)
SEEN = np.linspace(-1.0, 2.5, ROWS * GROUPS, dtype=np.float32).reshape(ROWS, GROUPS)
SERIES = np.sin(np.arange(TIMES * GROUPS, dtype=np.float32)).reshape(TIMES, GROUPS)
TURN = jnp.array([[0.7, 0.3], [0.2, 0.8]])
CENTRES = jnp.array([-1.0, 0.3, 2.0])
#: Which group a row of a long table belongs to, in no order; the last one has none.
GROUP = np.array([2, 0, 1, 1, 2, 0, 2])


def effects(name="u"):
    return numpyro.sample(name, dist.Normal(0.4, 1.5))


def class_of_each_row():
    """Zero inflation, with a share that is a param."""
    share = numpyro.param("share", 0.3, constraint=constraints.unit_interval)
    with numpyro.plate("groups", GROUPS):
        u = effects()
        with numpyro.plate("rows", ROWS):
            z = numpyro.sample("z", dist.Bernoulli(share))
            rate = jnp.where(z == 1, 1e-3, jnp.exp(u))
            numpyro.sample("y", dist.Poisson(rate), obs=COUNTS)


def class_of_each_row_of_a_table():
    with numpyro.plate("groups", GROUPS):
        u = effects()
    with numpyro.plate("rows", len(GROUP)):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.5, 0.3])))
        numpyro.sample("y", dist.Normal(u[GROUP] + CENTRES[z], 0.7), obs=SEEN.ravel()[:7])


def class_of_each_group():
    with numpyro.plate("groups", GROUPS):
        u = effects()
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(u + 2.0 * z, 0.6), obs=SEEN)


def mixture_of_effects():
    centre = numpyro.param("centre", CENTRES)
    with numpyro.plate("groups", GROUPS):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.2, 0.5, 0.3])))
        u = numpyro.sample("u", dist.Normal(centre[z], 1.0))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.StudentT(4.0, u, 0.6), obs=SEEN)


def class_of_all_groups():
    z = numpyro.sample("z", dist.Bernoulli(0.3))
    with numpyro.plate("groups", GROUPS):
        u = effects()
        numpyro.sample("y", dist.Normal(u + 2.0 * z, 0.6), obs=SEEN[0])


def class_of_each_pair():
    """Two groups that share a class are one component."""
    with numpyro.plate("pairs", 2, dim=-1):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        with numpyro.plate("members", 2, dim=-2):
            u = numpyro.sample("u", dist.Normal(2.0 * z, 1.0))
            numpyro.sample("y", dist.Normal(u, 0.6), obs=SEEN[:2, :2])


def two_in_a_row():
    with numpyro.plate("groups", GROUPS):
        first = numpyro.sample("first", dist.Bernoulli(0.3))
        second = numpyro.sample("second", dist.Categorical(TURN[first]))
        u = numpyro.sample("u", dist.Normal(2.0 * first, 1.0))
        with numpyro.plate("rows", ROWS):
            numpyro.sample("y", dist.Normal(u + second, 0.6), obs=SEEN)


def masked_rows():
    """Rows that a mask takes away, classes and all, and in one group every row."""
    valid = np.array([[1, 1, 0, 1], [1, 0, 0, 1], [0, 1, 0, 1]], bool)
    with numpyro.plate("groups", GROUPS):
        u = effects()
        with numpyro.plate("rows", ROWS), handlers.mask(mask=valid):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal(u + 2.0 * z, 0.6), obs=SEEN)


def class_that_depends_on_a_latent():
    with numpyro.plate("groups", GROUPS):
        a, u = effects("a"), effects()
        with numpyro.plate("rows", ROWS):
            z = numpyro.sample("z", dist.Bernoulli(logits=a))
            numpyro.sample("y", dist.Normal(u + 2.0 * z, 0.6), obs=SEEN)


def effects_of_rows():
    """Rows have effects, classes and a scale; other latents have none of them."""
    b = numpyro.sample("b", dist.Gamma(2.0, 1.5))
    numpyro.sample("x", dist.Poisson(b), obs=3.0)
    with numpyro.plate("groups", GROUPS):
        u, w = effects(), effects("w")
        numpyro.factor("pull", -0.1 * w**4)
        with numpyro.plate("rows", ROWS), handlers.scale(scale=1.5):
            v = numpyro.sample("v", dist.Normal(0.0, 0.8))
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal(u + v + 2.0 * z, 0.6), obs=SEEN)


def chain_of_each_group():
    with numpyro.plate("groups", GROUPS, dim=-1):
        u = effects()
        start = numpyro.sample("start", dist.Bernoulli(0.4))

    def move(state, y):
        with numpyro.plate("groups", GROUPS, dim=-1):
            state = numpyro.sample("state", dist.Categorical(TURN[state]))
            numpyro.sample("y", dist.Normal(u + 2.0 * state, 0.6), obs=y)
        return state, None

    scan(move, start, SERIES)


def chain_of_all_groups():
    with numpyro.plate("groups", GROUPS, dim=-1):
        u = effects()

    def move(state, y):
        state = numpyro.sample("state", dist.Categorical(TURN[state]))
        with numpyro.plate("groups", GROUPS, dim=-1):
            numpyro.sample("y", dist.Normal(u + 2.0 * state, 0.6), obs=y)
        return state, None

    scan(move, 0, SERIES)


EACH, ALL = np.arange(GROUPS), np.zeros(GROUPS, int)

#: Each with the component of each latent, by site.
MODELS = {
    each.__name__: (each, components)
    for each, components in [
        (class_of_each_row, {"u": EACH}),
        (class_of_each_row_of_a_table, {"u": EACH}),
        (class_of_each_group, {"u": EACH}),
        (mixture_of_effects, {"u": EACH}),
        (class_of_all_groups, {"u": ALL}),
        (class_of_each_pair, {"u": [[0, 1], [0, 1]]}),
        (two_in_a_row, {"u": EACH}),
        (masked_rows, {"u": EACH}),
        (class_that_depends_on_a_latent, {"a": EACH, "u": EACH}),
        (
            effects_of_rows,
            {"b": 0, "u": 1 + EACH, "v": [1 + EACH] * ROWS, "w": 5 + EACH},
        ),
        (chain_of_each_group, {"u": EACH}),
        (chain_of_all_groups, {"u": ALL}),
    ]
}
