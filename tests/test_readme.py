"""What the README shows, and the demo, run."""

import pathlib
import re
import runpy
import sys
import warnings

import matplotlib as mpl
import numpy as np
import pytest
from numpyro.infer.util import log_density

ROOT = pathlib.Path(__file__).parent.parent
mpl.use("Agg")
#: Error of a normal sample's 5 % quantile beside that of its mean.
QUANTILE_NOISE = 2.1


def read_summary(text):
    """Return the numbers of each row of a summary, and those of its last lines."""
    row = r"^ +(\w\S*) +(-?\d\S+(?: +-?\d\S*){3,4})$"
    rows = {
        name: [*(float(x) for x in rest.split()), None][:5]
        for name, rest in re.findall(row, text, re.M)
    }
    words = r"(log-evidence|±|ESS|r-hat|AIC|BIC|shortfall) (-?\d\S*)"
    return rows, {name: float(value) for name, value in re.findall(words, text)}


def test_the_code_of_the_readme_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.S)
    names = {"__name__": "readme"}
    exec(compile(block.group(1), "README.md", "exec"), names)

    # And prints what the README says, but for random numbers of other versions.
    said = re.search(r"```text\n(.*?)```", text, re.S).group(1)
    printed = capsys.readouterr().out
    (shown, line), (rows, last) = map(read_summary, (said, printed))
    assert len(shown) == 7 and set(shown) <= set(rows)
    assert len(line) == 7
    for name, (value, error, *ends, num_draws) in shown.items():
        new_value, new_error, *new_ends, new_num_draws = rows[name]
        # Two estimates are as good as equal; two means of draws have errors.
        noise = 0.0125 if num_draws is None else (1 / num_draws + 1 / new_num_draws) ** 0.5
        assert abs(value - new_value) < 4 * noise * error
        assert abs(error / new_error - 1) < (0.1 if num_draws is None else 3 * noise)
        for one, other in zip(ends, new_ends, strict=True):
            assert abs(one - other) < 4 * QUANTILE_NOISE * noise * error
    slack = {"log-evidence": 0.05, "±": 0.01, "ESS": 0.15, "r-hat": 0.1}
    for name, value in line.items():
        assert abs(value - last[name]) < slack.get(name, 0.1)


def test_the_demo_writes_its_results(monkeypatch, tmp_path, capsys):
    demo = ROOT / "examples" / "demo.py"
    monkeypatch.setattr(
        sys, "argv", ["demo.py", "--steps", "30", "--output", str(tmp_path)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(demo), run_name="__main__")
    assert list(tmp_path.glob("*.nc")) and list(tmp_path.glob("*.png"))
    assert "slope" in capsys.readouterr().out


@pytest.fixture(scope="module")
def front():
    """Return what the script of the front page defines."""
    return runpy.run_path(str(ROOT / "examples" / "guimmun.py"))


class Exact:
    """A fit that has found the exact answers."""

    def __init__(self, front):
        self.values, self.errors = np.array([*front["EXACT"].values()]).T
        self.log_evidence, self.log_evidence_se = front["EXACT_LOG_LIKELIHOOD"], 0.05

    @staticmethod
    def by_site(rows):
        return {"beta": rows[:4], "sd_mother": rows[4], "sd_community": rows[5]}

    @property
    def params(self):
        return self.by_site(self.values)

    def standard_errors(self):
        return self.by_site(self.errors)

    def confidence_intervals(self, prob):
        assert prob == 0.95
        reach = 1.96 * self.errors
        return self.by_site(np.stack([self.values - reach, self.values + reach], -1))


def test_the_front_picture_shows_each_estimate_under_its_name(front, tmp_path, capsys):
    fit = Exact(front)
    found = front["estimates"](fit)
    assert {name: row[:2] for name, row in found.items()} == front["EXACT"]
    front["report"](found, fit)
    row = r"sd of mothers +(\S+) +(\S+) +(\S+) +(\S+) +(\S+)$"
    shown = re.search(row, capsys.readouterr().out, re.M).groups()
    assert shown == ("2.274", "0.257", "2.274", "0.257", "1.091")
    front["plot"](found, fit, tmp_path / "picture.png")
    assert mpl.image.imread(tmp_path / "picture.png").shape[1] == 1350


def test_the_front_model_is_a_logistic_regression_with_nested_effects(front):
    args = front["model_args"]()
    sites = {"beta": np.zeros(4), "sd_mother": 2.0, "sd_community": 0.5}
    sites |= {"of_mother": np.zeros(1595), "of_community": np.zeros(161)}
    found = log_density(front["model"], args, {}, sites)[0]
    normal = -0.5 * np.log(2 * np.pi)
    prior = 1595 * (normal - np.log(2.0)) + 161 * (normal - np.log(0.5))
    np.testing.assert_allclose(found, prior - 2159 * np.log(2), rtol=1e-5)
    # Effects reach the children of that mother and of that community.
    sites["of_mother"] = np.full(1595, 40.0)
    sites["of_community"] = np.full(161, -40.0)
    balanced = log_density(front["model"], args, {}, sites)[0]
    prior -= 0.5 * 40.0**2 * (1595 / 2.0**2 + 161 / 0.5**2)
    np.testing.assert_allclose(balanced, prior - 2159 * np.log(2), rtol=1e-5)
