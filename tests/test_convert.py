"""The result as ArviZ holds it, in both of its generations."""

import arviz as az
import jax
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from jax import random

from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means

mpl.use("Agg")
OLD = az.__version__.startswith("0.")


@pytest.fixture(scope="module")
def fitted():
    jala = JALAEM(normal_means, num_particles=256)
    return jala, jala.run(random.key(0), 25, SCHOOLS, progress_bar=False)


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


# ArviZ 0.23 calls Matplotlib 3.11 in a way that Matplotlib has deprecated.
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
def test_arviz_summarises_and_plots_it(fitted):
    _, idata = fitted
    table = az.summary(idata, var_names=["x"])
    assert len(table) == 6 and np.isfinite(table["mean"].astype(float)).all()
    if OLD:
        az.plot_trace(idata, var_names=["x"])
    else:
        az.plot_trace_dist(idata, var_names=["x"])


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
