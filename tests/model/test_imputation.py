"""Latents that fill the gaps of an observed site, whose density is there alone."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from scipy.stats import multivariate_normal, norm

from numpyro_jala import JALAEM
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once

AGE = np.array([0.3, np.nan, 1.4, -0.5, np.nan, 0.9], np.float32)
SEEN = np.array([0.1, 0.9, 0.4, -0.6, -1.2, 1.1], np.float32)
MISSING = np.flatnonzero(np.isnan(AGE))
SLOPE, NOISE = 0.8, 0.5


def imputed(age, y, where="fn", fill=lambda age, x: age.at[MISSING].set(x)):
    centre = numpyro.sample("centre", dist.Normal(0.5, 1.0))
    prior = dist.Normal(centre, 1.2).expand([2])
    if where == "fn":
        x = numpyro.sample("x", prior.mask(False))
    elif where == "event":
        x = numpyro.sample("x", prior.mask(False).to_event(1))
    elif where == "part":
        x = numpyro.sample("x", prior.mask(np.array([True, False])))
    else:
        with handlers.mask(mask=False):
            x = numpyro.sample("x", prior)
    whole = fill(jnp.nan_to_num(jnp.asarray(age)), x)
    numpyro.sample("age", dist.Normal(centre, 1.2), obs=whole)
    numpyro.sample("y", dist.Normal(SLOPE * whole, NOISE), obs=y)


def exact():
    """The density of the ages and outcomes seen, all of them jointly normal."""
    ages = 1.0 + 1.2**2 * np.eye(6)
    both = np.block([[ages, SLOPE * ages], [SLOPE * ages, SLOPE**2 * ages]])
    both[6:, 6:] += NOISE**2 * np.eye(6)
    mean = 0.5 * np.repeat([1.0, SLOPE], 6)
    kept = np.isfinite([*AGE, *SEEN])
    values = np.array([*AGE, *SEEN], float)
    return multivariate_normal(mean[kept], both[np.ix_(kept, kept)]).logpdf(values[kept])


@pytest.mark.parametrize("where", ["fn", "event", "handler"])
def test_an_imputed_latent_has_its_density_once(where):
    jala = JALAEM(imputed, num_particles=256)
    jala.run(random.key(0), 0, AGE, SEEN, where, progress_bar=False)
    found = jala.diagnostics()
    assert abs(jala.log_evidence - exact()) < 4 * jala.log_evidence_se + 0.005 < 0.1
    spread = found["recursive_log_evidence_sd"] / np.sqrt(8)
    assert abs(found["recursive_log_evidence"] - exact()) < 4 * spread < 0.8
    # Given the outcome, a missing age is drawn towards it.
    assert jala.get_samples()["x"].mean(0)[1] < 0 < jala.get_samples()["x"].mean(0)[0]


@pytest.mark.parametrize("around", [False, True])
def test_an_imputed_latent_on_a_half_line_has_its_jacobian(around):
    def model(age):
        fn = dist.LogNormal(0.3, 0.5).expand([2])
        with handlers.mask(mask=not around):
            x = numpyro.sample("x", fn if around else fn.mask(False))
        whole = jnp.nan_to_num(jnp.asarray(age)).at[MISSING].set(x)
        numpyro.sample("age", dist.LogNormal(0.3, 0.5), obs=whole)

    age = np.exp(AGE)
    layout = lay_out(model, run_once(model, random.key(0), (age,), {}), (age,), {})
    at = jnp.array([0.2, -0.7])
    seen = norm(0.3, 0.5).logpdf(AGE[np.isfinite(AGE)]).sum() - np.nansum(AGE)
    imputed = norm(0.3, 0.5).logpdf(at).sum()  # of the logarithm
    for temperature in (0.0, 0.4, 1.0):
        found = layout.joint([])(layout.init_params, jnp.asarray(temperature), at)
        # The prior of what is imputed goes as its density where it is observed comes.
        np.testing.assert_allclose(-found, temperature * seen + imputed, rtol=1e-5)


@pytest.mark.parametrize(
    ("where", "fill", "words"),
    [
        ("fn", lambda age, x: age.at[MISSING].set(2 * x), "not each entry once and as it"),
        ("part", lambda age, x: age.at[MISSING].set(x), "masked in part.*at two sites"),
    ],
)
def test_a_density_that_is_not_the_latent_s_is_refused(where, fill, words):
    with pytest.raises(ValueError, match=f"'x' is .*{words}"):
        JALAEM(imputed).run(random.key(0), 0, AGE, SEEN, where, fill, progress_bar=False)
