"""Bad input gets a sentence."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints

from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means


def refuse(model, match, *args, **kwargs):
    with pytest.raises(ValueError, match=match):
        JALAEM(model).run(random.key(0), 1, *args, progress_bar=False, **kwargs)


def test_no_latent_site():
    def model(y):
        mu = numpyro.param("mu", 0.0)
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    refuse(model, "no latent sample site.*'mu', 'y'", SCHOOLS)


def test_no_observed_site():
    refuse(normal_means, "no observed site and no factor.*Did you pass the data")


def test_improper_prior():
    def model(y):
        x = numpyro.sample("x", dist.ImproperUniform(constraints.real, (), ()))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, "'x' has an improper prior", SCHOOLS)


def test_discrete_latent():
    def model(y):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(k, 1), obs=y)

    refuse(model, "'k' is BernoulliProbs, which is discrete", SCHOOLS)


def test_delta_latent():
    def model(y):
        x = numpyro.sample("x", dist.Delta(1.0))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    refuse(model, "'x' is a Delta", SCHOOLS)


def test_subsampled_plate():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1))
        with numpyro.plate("rows", 6, subsample_size=2) as index:
            numpyro.sample("y", dist.Normal(x, 1), obs=y[index])

    refuse(model, "'rows' subsamples 2 of 6", SCHOOLS)


def test_nan_in_the_data():
    bad = SCHOOLS.copy()
    bad[2] = np.nan
    refuse(normal_means, r"'y' holds 1 NaN, the first at index \(2,\)", bad)


def test_unknown_init_params():
    refuse(
        normal_means, r"init_params names \['sigma'\]", SCHOOLS, init_params={"sigma": 1.0}
    )


def test_init_params_outside_their_constraint():
    refuse(
        normal_means,
        r"init_params\['tau'\] = -1.0 lies",
        SCHOOLS,
        init_params={"tau": -1.0},
    )


def test_non_finite_start():
    def model(y):
        x = numpyro.sample("x", dist.Normal(0, 1))
        numpyro.sample("y", dist.Uniform(x, x + 1), obs=y)

    with pytest.warns(UserWarning, match="Out-of-support"):
        refuse(model, "No particle has a finite.*Site 'y'", jnp.array([-90.0, 90.0]))


def test_particles_of_other_names_or_sizes():
    jala = JALAEM(normal_means, num_particles=16)
    for given, match in (
        ({"z": np.zeros(16)}, "names"),
        ({"x": np.zeros((3, 6))}, "shape"),
    ):
        with pytest.raises(ValueError, match=match):
            jala.run(random.key(0), 1, SCHOOLS, init_particles=given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(num_particles=100), "not a multiple.*num_particles=96"),
        (dict(num_islands=1), "asks for adaptation"),
        (dict(num_islands=1, step_size=0.1), "preconditioner='auto' asks for adaptation"),
        (dict(step_size=-1.0), "not positive"),
        (dict(preconditioner="full"), "not one of"),
        (dict(resampling="best"), "not one of"),
        (dict(ess_threshold=2.0), "between 0"),
        (dict(num_particles=8), "one particle"),
    ],
)
def test_options(options, match):
    with pytest.raises(ValueError, match=match):
        JALAEM(normal_means, **options)


def test_annealing_needs_other_islands():
    jala = JALAEM(normal_means, num_islands=1, step_size=0.1, preconditioner=None)
    with pytest.raises(ValueError, match="Give init_particles"):
        jala.run(random.key(0), 1, SCHOOLS)


def test_a_result_before_a_run():
    with pytest.raises(ValueError, match="Call run first"):
        JALAEM(normal_means).log_evidence  # noqa: B018
    with pytest.raises(ValueError, match="reference="):
        JALAEM(normal_means, reference="posterior").run(random.key(0), 1, SCHOOLS)
