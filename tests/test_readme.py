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
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(block.group(1), "README.md", "exec"), {"__name__": "readme"})
    assert "log-evidence" in capsys.readouterr().out


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
