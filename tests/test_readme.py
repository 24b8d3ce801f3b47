"""What the README shows, and the demo, run."""

import pathlib
import re
import runpy
import sys
import warnings

import matplotlib as mpl

ROOT = pathlib.Path(__file__).parent.parent
mpl.use("Agg")


def read_summary(text):
    """Return the numbers of each row of a summary, and those of its last lines."""
    row = r"^ +(\w\S*) +(-?\d\S+(?: +-?\d\S*){3,4})$"
    rows = {
        name: [float(x) for x in rest.split()] for name, rest in re.findall(row, text, re.M)
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
    for name, (value, error, low, high, *ess) in shown.items():
        new_value, new_error, new_low, new_high, *new_ess = rows[name]
        loose, looser = (0.25, 0.2) if ess else (0.05, 0.1)  # draws, or an estimate
        for one, other in ((value, new_value), (low, new_low), (high, new_high)):
            assert abs(one - other) < loose * error
        assert abs(error / new_error - 1) < looser
        assert all(0.5 < a / b < 2 for a, b in zip(ess, new_ess, strict=True))
    slack = {"log-evidence": 0.05, "±": 0.01, "ESS": 0.15, "r-hat": 0.05}
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
