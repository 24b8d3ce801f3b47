"""The result as ArviZ holds it, in both of its generations."""

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random
from numpyro.infer import Predictive
from scipy.stats import norm

from numpyro_jala import JALAEM
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import describe_dims, run_once
from numpyro_jala.results import inference_data
from numpyro_jala.results.fitted import _join_islands
from tests.tools import SCHOOLS, assert_mean, normal_means

mpl.use("Agg")
OLD = az.__version__.startswith("0.")


@pytest.fixture
def fitted(compiled_means):
    idata = compiled_means.run(random.key(0), 25, SCHOOLS, progress_bar=False)
    return compiled_means, idata


def group_names(idata):
    return set(idata.groups()) if OLD else set(idata.children)


def test_it_is_what_arviz_returns(fitted):
    assert isinstance(fitted[1], az.InferenceData if OLD else xr.DataTree)


def test_groups_and_dims(fitted):
    jala, idata = fitted
    assert group_names(idata) >= {
        "posterior", "sample_stats", "weighted_posterior", "em_trace", "anneal_trace",
        "observed_data",
    }  # fmt: skip
    assert idata["posterior"]["x"].dims == ("chain", "draw", "group")
    assert idata["posterior"]["x"].shape == (8, 32, 6)
    assert idata["posterior"]["total"].dims == ("chain", "draw")
    assert idata["observed_data"]["y"].dims == ("group",)
    assert idata["sample_stats"]["log_marginal_likelihood"].dims == ("chain",)
    assert (
        idata["em_trace"]["tau"].dims == ("step",) and len(idata["em_trace"]["step"]) == 25
    )
    assert float(idata["anneal_trace"]["temperature"][-1]) == 1.0
    log_weight = idata["weighted_posterior"]["log_weight"].values
    np.testing.assert_allclose(np.exp(log_weight).sum(), 1, rtol=1e-5)
    assert idata.attrs["log_evidence"] == jala.log_evidence
    assert idata.attrs["reference"] == "prior"


def test_draws_of_equal_weight_are_particles_of_their_island(fitted):
    jala, idata = fitted
    draws, particles = (idata[g] for g in ("posterior", "weighted_posterior"))
    for name in ("x", "total"):
        pairs = zip(draws[name].values, particles[name].values, strict=True)
        for some, all_ in pairs:
            assert {row.tobytes() for row in some} <= {row.tobytes() for row in all_}
    weight = np.exp(particles["log_weight"].values)
    weight = weight / weight.sum(1, keepdims=True)
    again = jala.get_samples(group_by_chain=True)
    np.testing.assert_array_equal(again["x"], draws["x"].values)
    # Systematic draws differ from the weights by less than one in 32 for each particle.
    counts = (
        (draws["x"].values[:, :, None] == particles["x"].values[:, None]).all(-1).sum(1)
    )
    assert np.all(np.abs(counts - 32 * weight) < 1 + 1e-4)


def test_it_survives_netcdf(fitted, tmp_path):
    jala, idata = fitted
    path = tmp_path / "result.nc"
    idata.to_netcdf(str(path))
    back = az.from_netcdf(str(path))
    assert group_names(back) == group_names(idata)
    for group in ("posterior", "em_trace", "weighted_posterior"):
        for name in idata[group].data_vars:
            np.testing.assert_array_equal(back[group][name], idata[group][name])
    assert back.attrs["log_evidence"] == pytest.approx(jala.log_evidence)
    assert back.attrs["log_evidence_se"] == pytest.approx(jala.log_evidence_se)


def test_arviz_converts_it_by_itself(fitted):
    jala, _ = fitted
    idata = az.from_numpyro(jala)
    x = idata["posterior"]["x"]
    assert dict(zip(x.dims, x.shape, strict=True)) == (
        {"chain": 8, "draw": 32, "group": 6} if OLD else {"sample": 256, "group": 6}
    )


def test_the_posterior_is_that_of_the_weights(fitted):
    jala, idata = fitted
    samples, log_weight = jala.get_weighted_samples()
    expected = np.exp(log_weight) @ samples["x"]
    found = idata["posterior"]["x"].mean(("chain", "draw"))
    sd = samples["x"].std(0)
    np.testing.assert_allclose(found, expected, atol=float(0.2 * sd.max()))


def test_a_slash_in_a_name_becomes_a_dot():
    def model(y=None):
        x = numpyro.sample("a/x", dist.Normal(0, 1))
        numpyro.sample("a/y", dist.Normal(x, 1), obs=y)

    jala = JALAEM(model, num_particles=32, num_islands=4)
    idata = jala.run(random.key(0), 0, SCHOOLS, progress_bar=False)
    assert "a.x" in idata["posterior"] and "a/x" in idata.attrs["renamed_sites"]
    assert set(jax.tree.leaves(list(jala.get_samples()))) == {"a/x"}


def test_new_data_and_the_log_likelihood_belong_to_the_draws(fitted):
    jala, _ = fitted
    idata = jala.predict(random.key(3))
    draws = np.asarray(idata["posterior"]["x"])
    exact = norm(draws, 1.0).logpdf(SCHOOLS)
    np.testing.assert_allclose(idata["log_likelihood"]["y"], exact, rtol=1e-4, atol=1e-5)
    assert idata["log_likelihood"]["y"].dims == ("chain", "draw", "group")
    new = np.asarray(idata["posterior_predictive"]["y"])
    residuals = (new - draws).ravel()
    assert_mean(residuals, 0.0, resolution=0.2)
    assert_mean(residuals**2, 1.0, resolution=0.2)
    again = Predictive(normal_means, jala.get_samples(), params=jala.params)
    assert again(random.key(0))["y"].shape == (256, 6)


def test_a_factor_is_not_predicted():
    def model(y):
        x = numpyro.sample("x", dist.Normal())
        numpyro.factor("more", -0.1 * x**2)
        numpyro.sample("y", dist.Normal(x, 1.0).mask(y > 0), obs=y)

    trace = run_once(model, random.key(0), (SCHOOLS,), {})
    layout = lay_out(model, trace, (SCHOOLS,), {})
    params, position = layout.init_params, jnp.array([0.7])
    drawn, found = layout.predict(random.key(1), params, position, [SCHOOLS])
    assert set(drawn) == set(found) == {"y"} and not np.allclose(drawn["y"], SCHOOLS)
    exact = np.where(SCHOOLS > 0, norm(0.7, 1.0).logpdf(SCHOOLS), 0.0)
    np.testing.assert_allclose(found["y"], exact, rtol=1e-4)


# ArviZ 0.23 calls Matplotlib 3.11 in a deprecated way.
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
# Six observations with a latent each are not for importance sampling, as ArviZ says.
@pytest.mark.filterwarnings("ignore:Estimated shape parameter of Pareto")
@pytest.mark.filterwarnings("ignore:For one or more samples the posterior variance")
def test_arviz_reads_the_result(fitted):
    idata = fitted[0].predict(random.key(3))
    table = az.summary(idata)
    assert np.isfinite(table["mean"].astype(float)).all() and len(table) == 7
    loo = az.loo(idata)
    assert np.isfinite(loo.elpd_loo if OLD else loo.elpd)
    if OLD:
        assert np.isfinite(az.waic(idata).elpd_waic)
        drawn = (az.plot_trace, az.plot_posterior, az.plot_ppc)
    else:
        drawn = (az.plot_trace, az.plot_dist, az.plot_ppc_dist)
    for plot in drawn:
        plot(idata)
    plt.close("all")


def test_plates_name_the_axes_they_are_on():
    def model(y):
        numpyro.param("step", 0.0)
        with numpyro.plate("row", 4, dim=-3), numpyro.plate("column", 2, dim=-1):
            x = numpyro.sample("x", dist.Normal(jnp.zeros((4, 1, 2)), 1.0))
        with numpyro.plate("time", 3):
            z = numpyro.sample("z", dist.Dirichlet(jnp.ones(2)))
        numpyro.sample("y", dist.Normal(x.sum() + z.sum(), 1.0).mask(y > 0), obs=y)

    trace = run_once(model, random.key(0), (SCHOOLS,), {})
    values = {name: trace[name]["value"] for name in ("x", "z")}
    data = inference_data._dataset(values, (), describe_dims(trace))
    assert data["x"].dims == ("row", "x_dim_0", "column")
    assert data["z"].dims == ("time", "z_dim_0")


def test_a_site_may_be_empty():
    joined = _join_islands({"a": np.zeros((2, 3, 0)), "b": np.ones((2, 3))})
    assert joined["a"].shape == (6, 0) and joined["b"].shape == (6,)
