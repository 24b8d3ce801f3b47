import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from jax import random
from scipy.stats import chi2, norm

from numpyro_jala import JALAEM, compare, likelihood_ratio_test, print_comparison
from numpyro_jala.results import comparison
from tests.tools import SCHOOLS


def without_groups(y):
    """Means that are all the same: the smaller model, tau being zero."""
    mu = numpyro.param("mu", 0.0)
    numpyro.sample("unused", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def fixed(y):
    x = numpyro.sample("x", dist.Normal(1.0, 2.0))
    numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


def run(model, num_steps, y=SCHOOLS):
    jala = model if isinstance(model, JALAEM) else JALAEM(model, num_particles=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return jala.run(random.key(0), num_steps, y, progress_bar=False)


@pytest.fixture(scope="module")
def results(compiled_means, tmp_path_factory):
    """Results that have been to a file and back."""
    import xarray as xr

    folder = tmp_path_factory.mktemp("results")
    loaded = {}
    for name, model, steps in (
        ("large", compiled_means, 60),
        ("small", without_groups, 30),
        ("fixed", fixed, 0),
    ):
        path = str(folder / f"{name}.nc")
        data = run(model, steps)
        data.to_netcdf(path)
        if isinstance(data, getattr(xr, "DataTree", ())):
            loaded[name] = xr.load_datatree(path)
        else:
            import arviz

            loaded[name] = arviz.from_netcdf(path)
    return loaded


def exact_statistic():
    large = norm(SCHOOLS.mean(), SCHOOLS.std()).logpdf(SCHOOLS).sum()
    small = norm(SCHOOLS.mean(), 1.0).logpdf(SCHOOLS).sum()
    return large, small


def test_a_table_by_hand(results):
    large, small = exact_statistic()
    with pytest.warns(UserWarning, match="maximised"):
        table = compare({"small": results["small"], "large": results["large"]})
    assert list(table.index) == ["large", "small"] and list(table["rank"]) == [0, 1]
    np.testing.assert_allclose(table["log_evidence"], [large, small], atol=0.05)
    gap = table["log_evidence"]["large"] - table["log_evidence"]["small"]
    np.testing.assert_allclose(table["diff"], [0, gap])
    np.testing.assert_allclose(table["log_bayes_factor"], [0, -gap])
    np.testing.assert_allclose(table["diff_se"], [0, np.hypot(*table["se"])])
    np.testing.assert_allclose(table["probability"]["large"], 1 / (1 + np.exp(-gap)))
    np.testing.assert_allclose(
        table["aic"], 2 * np.array([2, 1]) - 2 * table["log_evidence"]
    )
    bic = np.log(6) * np.array([2, 1]) - 2 * table["log_evidence"]
    np.testing.assert_allclose(table["bic"], bic)


def test_prior_probabilities_count(results):
    pair = {"small": results["small"], "large": results["large"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        even = compare(pair)["probability"]
        odd = compare(pair, prior={"small": 3.0, "large": 1.0})["probability"]
    ratio = (odd["small"] / odd["large"]) / (even["small"] / even["large"])
    np.testing.assert_allclose(ratio, 3)
    with pytest.raises(ValueError, match="positive number for each"):
        compare(pair, prior={"small": 1.0})


def test_the_likelihood_ratio_and_its_boundary(results):
    found = likelihood_ratio_test(results["small"], results["large"])
    large, small = exact_statistic()
    assert abs(found.statistic - 2 * (large - small)) < 4 * found.statistic_se + 0.05
    assert found.df == 1
    np.testing.assert_allclose(found.p_value, chi2(1).sf(found.statistic), rtol=1e-6)
    np.testing.assert_allclose(found.p_value_boundary, found.p_value / 2, rtol=1e-6)
    with pytest.raises(ValueError, match="must have more"):
        likelihood_ratio_test(results["large"], results["small"])


def test_unlike_models_are_said(results):
    with pytest.warns(UserWarning, match="like with like"):
        compare({"fixed": results["fixed"], "large": results["large"]})
    other = run(fixed, 0, SCHOOLS + 1)
    with pytest.warns(UserWarning, match="different data"):
        compare({"fixed": results["fixed"], "other": other})
    with pytest.raises(ValueError, match="different data"):
        likelihood_ratio_test(other, results["large"])
    with pytest.warns(UserWarning, match="turn the order round"):
        compare({"one": results["fixed"], "two": results["fixed"]})
    with pytest.raises(ValueError, match="no attribute"):
        compare({"nothing": results["fixed"]["posterior"]})


def test_words_for_bayes_factors_are_printed(capsys):
    columns = {"diff": [0.0, 0.9, 2.9, 4.9, np.inf], "num_params": 2}
    table = pd.DataFrame(columns, index=list("abcde"))
    print_comparison(table)
    text = capsys.readouterr().out
    for name, word in zip("bcde", ("not worth", "positive", "strong", "very"), strict=True):
        assert f"for a against {name}: {word}" in text


def test_maximised_likelihoods_are_not_read_as_bayes_factors(capsys):
    columns = {"diff": [0.0, 2.0], "num_params": [4, 1], "aic": [8.0, 6.0]}
    print_comparison(pd.DataFrame(columns, index=["large", "small"]))
    text = capsys.readouterr().out
    assert "Evidence for" not in text and "small is best" in text


def test_the_same_data_in_another_order_and_with_gaps_are_the_same():
    gaps, other = np.array([1.0, np.nan, 2.0]), np.array([3.0, 4.0, 5.0])
    models = [
        comparison._Model(0.0, 0.1, 0, 6.0, observed)
        for observed in ({"a": gaps, "b": other}, {"x": other, "y": gaps}, {"a": gaps})
    ]
    assert comparison._same_data(models[0], models[1])
    assert not comparison._same_data(models[0], models[2])
