import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax import random

from numpyro_jala import best_and_worst, compare, plots, random_effects
from tests.tools import SCHOOLS

mpl.use("Agg")


@pytest.fixture
def idata(compiled_means):
    yield compiled_means.run(random.key(0), 40, SCHOOLS, progress_bar=False)
    plt.close("all")


def heights(ax):
    return sorted(
        line.get_ydata()[0] for line in ax.lines if len(set(line.get_ydata())) == 1
    )


def test_params_are_drawn_with_their_estimate_and_interval(idata, compiled_means):
    axes = plots.plot_params(idata)
    assert [ax.get_title() for ax in axes] == ["mu", "tau"]
    for ax, name in zip(axes, ("mu", "tau"), strict=True):
        np.testing.assert_allclose(ax.lines[0].get_ydata(), idata["em_trace"][name])
        assert compiled_means.params[name] in heights(ax)
        low, high = compiled_means.confidence_intervals()[name]
        box = ax.patches[0].get_extents().transformed(ax.transData.inverted())
        np.testing.assert_allclose([box.y0, box.y1], [low, high], rtol=1e-5)
    given = plt.subplots()[1]
    assert plots.plot_params(idata, ["tau"], given)[0] is given
    with pytest.raises(ValueError, match="no param 'sigma'; there are mu, tau"):
        plots.plot_params(idata, ["sigma"])


def test_the_log_evidence_is_drawn_with_its_errors(idata):
    given = plt.subplots()[1]
    assert plots.plot_log_evidence(idata, given) is given
    assert idata.attrs["log_evidence"] in heights(given)
    low, high = given.get_ylim()
    assert low < idata.attrs["log_evidence"] < high


def test_particles_temperature_and_islands_are_drawn(idata):
    ax = plots.plot_ess(idata)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), idata["anneal_trace"]["ess"])
    dots = (idata["em_trace"]["resampled"].values > 0).sum()
    assert len(ax.lines[3].get_xdata()) == dots
    ax = plots.plot_temperature(idata)
    assert ax.lines[0].get_ydata()[-1] == 1.0
    ax = plots.plot_islands(idata)
    islands = idata["sample_stats"]["log_marginal_likelihood"]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), islands)


def test_a_comparison_is_drawn_the_best_on_top(idata):
    other = idata.copy()
    other.attrs = {**idata.attrs, "log_evidence": idata.attrs["log_evidence"] - 3}
    table = compare({"one": other, "two": idata})
    ax = plots.plot_comparison(table)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["two", "one"]
    assert ax.yaxis_inverted()


def test_group_effects_are_drawn_in_order_with_their_intervals(idata):
    table = random_effects(idata, "x", list("abcdef"))
    ax = plots.plot_random_effects(best_and_worst(table, 2))
    shown = [*table.index[:2], *table.index[-2:]][::-1]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == shown
    np.testing.assert_allclose(ax.lines[0].get_xdata(), table["mean"][shown])
    ends = np.array([path[:, 0] for path in ax.collections[0].get_segments()])
    np.testing.assert_allclose(ends, table.loc[shown, ["low", "high"]])
    many = table.loc[np.repeat(table.index, 20)]
    assert plots.plot_random_effects(many).get_yticklabels() == []


def test_what_is_not_there_is_said(compiled_means, idata):
    with pytest.warns(UserWarning, match="not converged"):
        empty = compiled_means.run(random.key(0), 0, SCHOOLS, progress_bar=False)
    with pytest.raises(ValueError, match="no group 'em_trace'"):
        plots.plot_params(empty)
