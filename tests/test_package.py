"""What is published: one version, links that lead somewhere, files that install and run."""

import email
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import numpyro_jala

ROOT = Path(__file__).parents[1]
RELATIVE = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s]+)\)")
REPOSITORY = "https://example.org/somebody/numpyro_jala"


def run(*command, **options):
    """Run a command, and show what it said if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder, source=ROOT, repository=""):
    """Build sdist and wheel with the backend at hand, so that nothing is downloaded."""
    command = (sys.executable, "-m", "hatchling", "build", "-d", str(folder))
    run(*command, cwd=source, env={**os.environ, "NUMPYRO_JALA_REPOSITORY": repository})
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def described(wheel):
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        name = next(each for each in file.namelist() if each.endswith("/METADATA"))
        return email.message_from_bytes(file.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Make an environment with a wheel built from the sdist, and the packages at hand."""
    folder = tmp_path_factory.mktemp("install")
    with tarfile.open(built[0]) as file:
        file.extractall(folder, filter="data")
    _, wheel = build(folder / "dist", next(folder.iterdir()))
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check",
        "install", "--no-deps", "--no-index", str(wheel))  # fmt: skip
    # A .pth file in a folder that is itself named by a .pth file is not read, so the
    # checkout, which is installed in that way, cannot be imported.
    at_hand = Path(pytest.__file__).parents[1]
    site = next((folder / "env").glob("lib/python*/site-packages"))
    (site / "at_hand.pth").write_text(f"{at_hand}\n")
    return python


def test_the_version_is_the_same_everywhere(built):
    version = numpyro_jala.__version__
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    changed = re.search(
        r"^## (\d\S*\d)", (ROOT / "docs" / "changelog.md").read_text(), re.M
    )
    assert cited.group(1) == changed.group(1) == version
    assert described(built[1])["Version"] == metadata.version("numpyro_jala") == version


def test_the_wheel_holds_the_whole_package_and_nothing_else(built):
    with zipfile.ZipFile(built[1]) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    source = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "numpyro_jala").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == source
    assert "numpyro_jala/py.typed" in packed


def test_links_of_the_readme_lead_to_files():
    links = RELATIVE.findall((ROOT / "README.md").read_text())
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_links_of_the_published_readme_work_elsewhere(built, tmp_path):
    own = (ROOT / "README.md").read_text()
    plain = described(built[1]).get_payload()
    assert RELATIVE.findall(plain) == [] and "](" in plain
    _, wheel = build(tmp_path, repository=REPOSITORY)
    message = described(wheel)
    linked = re.findall(
        rf"\]\({REPOSITORY}/(?:blob|raw)/v([^/]+)/([^)\s]+)\)", str(message)
    )
    expected = [(numpyro_jala.__version__, link) for link in RELATIVE.findall(own)]
    assert linked == expected
    assert message["Project-URL"] == f"Repository, {REPOSITORY}"


def test_the_package_works_where_it_is_installed(installed, tmp_path):
    code = (
        "import numpyro_jala, importlib.metadata as m;"
        "print(numpyro_jala.__file__, numpyro_jala.__version__, m.version('numpyro_jala'))"
    )
    file, version, declared = run(
        str(installed), "-W", "ignore", "-c", code, cwd=tmp_path
    ).split()
    assert Path(file).is_relative_to(installed.parents[1])
    assert version == declared == numpyro_jala.__version__


@pytest.mark.slow
def test_a_tutorial_runs_where_the_package_is_installed(installed, tmp_path):
    page = (ROOT / "docs" / "start.md").read_text()
    cells = re.findall(r"```\{code-cell\} python\n(.*?)```", page, re.S)
    assert len(cells) > 5
    (tmp_path / "tutorial.py").write_text("\n".join(cells))
    quiet = ("-W", "error", "-W", "ignore::FutureWarning")  # ArviZ announces ArviZ 1.0
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = (str(installed), *quiet, "tutorial.py")
    printed = run(*command, cwd=tmp_path, env=environment)
    assert "log-evidence" in printed and "heavy tails" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"tutorial.py", "fit.nc"}


def test_workflows_call_what_there_is():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert all(("run" in step) != ("uses" in step) for step in steps), path
        lines = "\n".join(step.get("run", "") for step in steps)
        called |= set(re.findall(r"make (\w+)", lines))
    assert called == {"test", "lint", "types", "docs", "dist"}
    assert called <= targets
