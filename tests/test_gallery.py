"""The gallery's models are what they say, and the page lists all of them."""

import re
import sys
from importlib import import_module
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.contrib.funsor import enum, log_density
from numpyro.infer.util import log_density as plain_log_density
from scipy import special, stats

ROOT = Path(__file__).parents[1]
FOLDERS = [ROOT / "examples" / name for name in ("gallery", "benchmarks", "paper")]
PAGE = ROOT / "docs" / "gallery.md"


@pytest.fixture
def gallery(monkeypatch):
    """Import a file of the gallery, and forget it and its neighbours afterwards."""
    for folder in reversed(FOLDERS):
        monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        source = str(getattr(sys.modules[name], "__file__", ""))
        if any(str(folder) in source for folder in FOLDERS):
            del sys.modules[name]


def test_every_model_has_a_page_data_and_a_way_to_its_answer(gallery):
    entries = gallery("run").load()
    assert len(entries) >= 25
    for name, entry in entries.items():
        assert callable(entry.model) and entry.title, name
        assert entry.after.startswith("https://num.pyro.ai/"), name
        assert isinstance(entry.args, tuple), name
        if entry.exact is not None:
            assert entry.by, name


def test_every_file_of_the_gallery_is_imported(gallery):
    families = gallery("run").FAMILIES
    tools = {"entry", "listing", "picture", "reference", "run"}
    assert {path.stem for path in FOLDERS[0].glob("*.py")} == {*families, *tools}
    for name in (*families, *tools):
        assert gallery(name).__doc__, name


def test_the_logistic_model_of_baseball_has_its_density(gallery):
    baseball = gallery("baseball")
    n, y = (np.asarray(each, float) for each in baseball.DATA)
    eta = np.linspace(-2.0, 0.5, y.size)
    point = {"loc": -1.2, "scale": 0.4, "log_odds": jnp.asarray(eta)}
    found, _ = plain_log_density(baseball.logistic, baseball.DATA, {}, point)
    prior = stats.norm(-1, 1).logpdf(-1.2) + stats.halfcauchy.logpdf(0.4)
    effects = stats.norm(-1.2, 0.4).logpdf(eta).sum()
    hits = stats.binom(n, special.expit(eta)).logpmf(y).sum()
    np.testing.assert_allclose(found, prior + effects + hits, rtol=1e-5)


@pytest.mark.parametrize("is_masked", [True, False])
def test_the_states_of_animals_are_summed_as_by_hand(gallery, is_masked):
    capture = gallery("capture")
    model = capture.model_1 if is_masked else capture.model_1_unmasked
    point = {"survival": 0.6, "recapture": 0.7}
    found, _ = log_density(enum(model, -2), capture.DATA, {}, point)
    histories = capture.DATA[0].astype(float)
    survival = np.full((1, *histories.shape), 0.6)
    by_hand = capture.log_likelihood(histories, survival, np.array([0.7]), is_masked)
    np.testing.assert_allclose(found, by_hand[0], rtol=1e-5)


def test_exponential_smoothing_has_its_density(gallery):
    series = gallery("series")
    y = series.seasonal_data()
    rates, noise, level, trend = (0.4, 0.3, 0.2), 0.5, 0.1, 0.05
    seasons = [0.5, -0.2, -0.6, 0.3]
    names = ("of_level", "of_trend", "of_season")
    point = dict(zip(names, rates, strict=True)) | {"noise": noise, "level": level}
    point |= {"trend": trend, "seasons": jnp.array(seasons)}
    found, _ = plain_log_density(series.holt_winters, (y, 4), {}, point)
    total = stats.halfnorm.logpdf(noise) + stats.norm.logpdf([level, trend, *seasons]).sum()
    a, b, c = rates[0], rates[1], rates[2] * (1 - rates[0])
    for t, now in enumerate(y.astype(float)):
        season, expected = seasons[t], level + trend
        total += stats.norm(expected + season, noise).logpdf(now)
        seasons.append(c * (now - expected) + (1 - c) * season)
        new = a * (now - season) + (1 - a) * expected
        level, trend = new, b * (new - level) + (1 - b) * trend
    np.testing.assert_allclose(found, total, rtol=1e-5)


def test_a_network_in_one_order_stands_for_all_of_them(gallery):
    neural, rng = gallery("neural"), np.random.default_rng(0)
    first, third = rng.normal(size=(3, 3)), np.sort(rng.random(3))
    first[0] = np.sort(np.abs(first[0]))
    same = {"second": jnp.asarray(rng.normal(size=(3, 3))), "precision": 2.0}
    args = (*neural.curve(), 3)
    whole = same | {"first": jnp.asarray(first), "third": jnp.asarray(third[:, None])}
    one = same | {"start": jnp.asarray(first[0]), "rest": jnp.asarray(first[1:])}
    one |= {"third": jnp.asarray(third)}
    expected, _ = plain_log_density(neural.bayesian_network, args, {}, whole)
    found, _ = plain_log_density(neural.ordered_network, args, {}, one)
    np.testing.assert_allclose(found, expected + np.log(48.0**2), rtol=1e-5)
    # Another order, and the negative of a unit, have the same density.
    order, sign = [2, 0, 1], np.array([1.0, -1.0, 1.0])
    turned = whole | {"first": jnp.asarray((first * sign)[:, order])}
    turned |= {"second": jnp.asarray((np.asarray(same["second"]) * sign[:, None])[order])}
    again, _ = plain_log_density(neural.bayesian_network, args, {}, turned)
    np.testing.assert_allclose(again, expected, rtol=1e-5)


def test_the_tail_of_weights_has_the_shape_it_was_drawn_with(gallery):
    reference, rng = gallery("reference"), np.random.default_rng(0)
    shapes = [reference.pareto_shape(np.log1p(rng.pareto(2.0, 20_000))) for _ in range(20)]
    num_tail = 3 * np.sqrt(20_000)
    # Of so many excesses the estimate has variance (1 + k)^2 / n for k = 1/2.
    error = 1.5 / np.sqrt(num_tail * len(shapes))
    assert abs(np.mean(shapes) - 0.5) < 4 * error < 0.1


def test_a_bridge_and_importance_sampling_find_a_known_constant(gallery):
    reference = gallery("reference")
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 2)) * [1.0, 3.0] + 2.0
    mixture = reference.fit_mixture(draws[:2000], 2)

    def log_ratio(x):
        target = stats.norm([2.0, 2.0], [1.0, 3.0]).logpdf(x).sum(-1) + 1.5
        return target - mixture.log_density(x)

    proposed = log_ratio(mixture.draw(rng, 20_000))
    by_importance = special.logsumexp(proposed) - np.log(proposed.size)
    assert abs(by_importance - 1.5) < 4 * np.exp(proposed - 1.5).std() / np.sqrt(20_000)
    found = reference.bridge(log_ratio(draws[2000:]), proposed, 2000.0)
    assert abs(found - 1.5) < 0.05


def test_the_page_lists_every_model_and_is_made_from_the_records(gallery):
    listing, text = gallery("listing"), PAGE.read_text()
    entries = gallery("run").load()
    assert [name for name in entries if f"`{name}`" not in text] == []
    assert listing.fill(text, listing.tables) == text
    assert set(listing.read(listing.RECORDS)) <= set(entries)


def test_the_pictures_of_the_page_exist_and_are_small():
    named = re.findall(r"\]\(gallery/(\w+\.png)\)", PAGE.read_text())
    stored = {path.name: path.stat().st_size for path in PAGE.with_suffix("").glob("*.png")}
    assert set(named) == set(stored)
    assert max(stored.values(), default=0) < 20_000
