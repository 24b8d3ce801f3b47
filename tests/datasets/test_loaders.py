import numpy as np
import pytest

from numpyro_jala import datasets
from numpyro_jala.datasets.tables import number_levels
from tests.test_house import PACKAGE, ROOT

LOADERS = [name for name in datasets.__all__ if name.startswith("load_")]
#: Columns that number groups, and how many groups each has.
GROUPS = {
    "bacteria": {"child": 50},
    "cbpp": {"herd": 15, "period": 4},
    "dyestuff": {"batch": 6},
    "dyestuff2": {"batch": 6},
    "epil": {"subject": 59, "period": 4},
    "guimmun": {"mother": 1595, "community": 161},
    "pastes": {"batch": 10, "cask": 30},
    "penicillin": {"plate": 24, "sample": 6},
    "sleepstudy": {"subject": 18},
}


def load(name):
    return getattr(datasets, f"load_{name}")()


def test_every_table_has_a_loader_and_a_source():
    tables = {path.stem for path in (PACKAGE / "datasets").glob("*.csv")}
    assert tables == {name.removeprefix("load_") for name in LOADERS}
    sources = (PACKAGE / "datasets" / "README.md").read_text()
    assert [name for name in tables if f"`{name}.csv`" not in sources] == []


@pytest.mark.parametrize("name", LOADERS)
def test_columns_are_finite_and_as_long_as_each_other(name):
    data = getattr(datasets, name)()
    rows = [column for key, column in data._asdict().items() if key not in NAMES]
    assert len({len(column) for column in rows}) == 1
    assert all(np.isfinite(column).all() for column in rows)
    for field in data._fields:  # the docstring speaks of each
        assert field in type(data).__doc__


NAMES = ("children", "subjects")


@pytest.mark.parametrize("name", GROUPS)
def test_groups_are_numbered_from_zero_without_gaps(name):
    for column, count in GROUPS[name].items():
        found = getattr(load(name), column)
        assert found.dtype.kind == "i"
        np.testing.assert_array_equal(np.unique(found), np.arange(count))
        # In the order in which they appear, so that names can be found again.
        first = np.unique(found, return_index=True)[1]
        assert (np.diff(first) > 0).all()


def test_levels_are_numbered_in_the_order_in_which_they_appear():
    index, levels = number_levels(np.array(["b", "c", "b", "a", "c"]))
    np.testing.assert_array_equal(index, [0, 1, 0, 2, 1])
    np.testing.assert_array_equal(levels, ["b", "c", "a"])


def test_numbers_of_groups_belong_to_the_names():
    data, table = load("bacteria"), datasets.read_table("bacteria")
    np.testing.assert_array_equal(data.children[data.child], table["ID"])
    data, table = load("sleepstudy"), datasets.read_table("sleepstudy")
    np.testing.assert_array_equal(data.subjects[data.subject], table["Subject"])


@pytest.mark.parametrize(
    "name, inner, outer", [("guimmun", "mother", "community"), ("pastes", "cask", "batch")]
)
def test_nested_groups_are_in_one_group_each(name, inner, outer):
    data = load(name)
    inner, outer = getattr(data, inner), getattr(data, outer)
    assert len(set(zip(inner, outer, strict=True))) == len(set(inner))


def test_the_sleep_study_has_the_line_that_lme4_finds():
    # The design is balanced: the fixed effects are those of least squares.
    data = load("sleepstudy")
    slope, intercept = np.polyfit(data.days, data.reaction, 1)
    np.testing.assert_allclose([intercept, slope], [251.4051, 10.4673], atol=1e-4)


def mean_squares(groups, y):
    means = np.array([y[groups == group].mean() for group in np.unique(groups)])
    within = ((y - means[groups]) ** 2).sum() / (len(y) - len(means))
    return (len(y) / len(means)) * means.var(ddof=1), within


def test_only_the_simulated_dyestuff_varies_less_between_batches_than_within():
    between, within = mean_squares(*load("dyestuff"))
    assert np.sqrt((between - within) / 5) == pytest.approx(42.00, abs=0.01)  # as by REML
    between, within = mean_squares(*load("dyestuff2"))
    assert between < within


def test_seizures_and_cases_are_counts_as_published():
    epil, cbpp = load("epil"), load("cbpp")
    assert epil.seizures.max() == 102 and epil.base.max() == 151
    assert len(set(epil.subject[epil.treated == 1])) == 31
    assert (cbpp.incidence <= cbpp.size).all() and cbpp.incidence.sum() == 99


def test_answers_are_coded_as_in_the_table():
    data, table = load("guimmun"), datasets.read_table("guimmun")
    for column, key in zip(
        (data.immunised, data.aged_two, data.rural),
        ("immun", "kid2p", "rural"),
        strict=True,
    ):
        np.testing.assert_array_equal(column == 1, table[key] == "Y")
    np.testing.assert_array_equal(data.indigenous, table["pcInd81"])


def test_digits_are_those_of_mnist():
    with np.load(ROOT / "examples" / "data" / "mnist_2479.npz") as file:
        images, labels = file["images"], file["labels"]
    chosen = np.concatenate([np.flatnonzero(labels == digit)[:30] for digit in (2, 4)])
    small = images[chosen].reshape(-1, 7, 4, 7, 4).mean((2, 4)) / 255.0
    data = load("digits")
    np.testing.assert_array_equal(data.digit, labels[chosen])
    np.testing.assert_array_equal(data.pixels, (small > 0.4).reshape(60, -1))


def test_an_unknown_table_is_named_with_those_that_there_are():
    with pytest.raises(ValueError, match="no data set 'iris'; there are bacteria, cbpp"):
        datasets.read_table("iris")
