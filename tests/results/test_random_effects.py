import numpy as np
import pytest
import xarray as xr
from jax import random
from scipy.stats import norm

from numpyro_jala import best_and_worst, random_effects
from numpyro_jala.results.groups import find_group
from tests.tools import SCHOOLS


def result(values, dims, **groups):
    data = xr.Dataset({"u": (("chain", "draw", *dims), values)})
    return xr.DataTree.from_dict({"/posterior": data, **groups})


@pytest.fixture(scope="module")
def drawn():
    """Draws of five groups whose means, errors and quantiles are known."""
    quantiles = norm.ppf((np.arange(2_000) + 0.5) / 2_000)  # of a standard normal
    mean, sd = np.array([1.0, -2.0, 0.5, 3.0, -1.0]), np.array([0.1, 0.4, 1.0, 0.2, 0.3])
    values = mean + sd * quantiles[:, None]
    return mean, sd, values.reshape(4, 500, 5)


def test_means_errors_and_intervals_are_those_of_the_draws(drawn):
    mean, sd, values = drawn
    table = random_effects(result(values, ["group"]), "u", list("abcde"), prob=0.8)
    assert list(table.index) == list("daceb")
    assert table.index.name == "group"
    order = np.argsort(-mean)
    np.testing.assert_allclose(table["mean"], mean[order], atol=1e-6)
    np.testing.assert_allclose(table["se"], sd[order], rtol=2e-3)
    reach = norm.ppf(0.9) * sd[order]
    np.testing.assert_allclose(table["low"], mean[order] - reach, atol=2e-3)
    np.testing.assert_allclose(table["high"], mean[order] + reach, atol=2e-3)


def test_a_centre_is_subtracted_and_an_entry_chosen(drawn):
    mean, sd, values = drawn
    pair = np.stack([values, 10 + 2 * values], -1)
    idata = result(pair, ["group", "u_dim_0"])
    table = random_effects(idata, "u", entry=1, centre=10.0).sort_index()
    np.testing.assert_allclose(table["mean"], 2 * mean, atol=1e-5)
    np.testing.assert_allclose(table["se"], 2 * sd, rtol=2e-3)
    np.testing.assert_array_equal(table.index, np.arange(5))
    reach = 2 * norm.ppf(0.95) * sd
    np.testing.assert_allclose(table["high"], 2 * mean + reach, atol=0.01)
    np.testing.assert_allclose(table["low"], 2 * mean - reach, atol=0.01)


def test_where_draws_are_thinned_the_summary_of_all_counts(drawn):
    mean, sd, values = drawn
    rows = np.stack([mean, sd, mean - 1, mean, mean + 1])
    summary = xr.Dataset({"u": (("statistic", "group"), rows)})
    idata = result(values[:, :3], ["group"], **{"/latent_summary": summary})
    table = random_effects(idata, "u").sort_index()
    np.testing.assert_array_equal(table["mean"], mean)
    np.testing.assert_array_equal(table["se"], sd)
    np.testing.assert_allclose(table["high"] - table["low"], 2.0)
    other = random_effects(idata, "u", prob=0.5).sort_index()
    assert not np.allclose(other["mean"], mean)  # no other interval is stored


def test_best_and_worst_are_the_ends_of_the_table(drawn):
    table = random_effects(result(drawn[2], ["group"]), "u", list("abcde"))
    assert list(best_and_worst(table, 1).index) == ["d", "b"]
    shuffled = table.sort_index()
    assert list(best_and_worst(shuffled, 2).index) == ["d", "a", "e", "b"]
    assert list(best_and_worst(shuffled, 3).index) == list(table.index)


def test_what_cannot_be_shown_is_said(drawn):
    idata = result(drawn[2], ["group"])
    with pytest.raises(ValueError, match="no latent site 'v'; there are u"):
        random_effects(idata, "v")
    with pytest.raises(ValueError, match="There are 2 names, but site 'u' has 5 groups"):
        random_effects(idata, "u", ["a", "b"])
    with pytest.raises(ValueError, match=r"shape \(5,\) and entry=0"):
        random_effects(idata, "u", entry=0)
    pair = result(np.stack([drawn[2]] * 2, -1), ["group", "u_dim_0"])
    with pytest.raises(ValueError, match=r"shape \(5, 2\) and entry=None"):
        random_effects(pair, "u")
    with pytest.raises(ValueError, match="prob=1.0 is not between 0 and 1"):
        random_effects(idata, "u", prob=1.0)


def test_effects_of_a_fit_are_those_of_the_normal_posterior(compiled_means):
    idata = compiled_means.run(random.key(0), 40, SCHOOLS, progress_bar=False)
    mu, tau = (float(compiled_means.params[name]) for name in ("mu", "tau"))
    shrinkage = tau**2 / (1 + tau**2)
    table = random_effects(idata, "x", centre=mu).sort_index()
    draws = find_group(idata, "posterior")["x"]
    error = np.sqrt(shrinkage / (0.3 * draws.sizes["chain"] * draws.sizes["draw"]))
    np.testing.assert_allclose(table["mean"], shrinkage * (SCHOOLS - mu), atol=4 * error)
    np.testing.assert_allclose(table["se"], np.sqrt(shrinkage), rtol=0.25)
