"""What the README shows, and the demo, run."""

import pathlib
import re
import runpy
import sys
import warnings

import matplotlib as mpl

ROOT = pathlib.Path(__file__).parent.parent
mpl.use("Agg")


def test_the_code_of_the_readme_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.S)
    names = {"__name__": "readme"}
    exec(compile(block.group(1), "README.md", "exec"), names)
    assert "log-evidence" in capsys.readouterr().out

    # And prints what the README says, but for random numbers of other versions.
    jala = names["jala"]
    errors = jala.standard_errors()
    shown = re.findall(r"^ +(mu|sigma|tau) +(\d\S+) +(\d\S+)", text, re.M)
    assert len(shown) == 3
    for name, estimate, error in shown:
        assert abs(float(estimate) - jala.params[name]) < 0.05 * errors[name]
        assert abs(float(error) / errors[name] - 1) < 0.1
    (log_evidence,) = re.findall(r"^log-evidence (\S+)", text, re.M)
    assert abs(float(log_evidence) - jala.log_evidence) < 0.05


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
