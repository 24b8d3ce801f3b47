"""A run that is killed goes on as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random

from numpyro_jala import JALAEM
from numpyro_jala.inference import checkpoint
from numpyro_jala.jalaem import Start
from tests.tools import SCHOOLS, normal_means

NOTHING_GIVEN = Start(None, None, None, None)
CHILD = """
import sys
from jax import random
from numpyro_jala import JALAEM
from tests.tools import SCHOOLS, normal_means
jala = JALAEM(normal_means, num_particles=256)
jala.run(random.key(0), 100_000, SCHOOLS, checkpoint=sys.argv[1], checkpoint_every=20,
         progress_bar=False)
"""


def run(jala, path, num_steps=60, data=SCHOOLS, seed=0, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The parameters have not converged")
        jala.run(
            random.key(seed),
            num_steps,
            data,
            progress_bar=False,
            checkpoint=path,
            checkpoint_every=20,
            **options,
        )
    return jala


def everything(jala):
    """All numbers of a result."""
    leaves = jax.tree.leaves(
        (
            jala.params,
            jala.get_samples(),
            jala.get_extra_fields(),
            jala.standard_errors(),
            jala.diagnostics(),
            jala.log_evidence,
        )
    )
    return [np.asarray(leaf) for leaf in leaves]


def assert_same(first, second):
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_killed_process_is_resumed_bit_by_bit(means, tmp_path):
    path = tmp_path / "run.npz"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, path], cwd=Path(__file__).parents[2]
    )
    while not path.exists():
        assert child.poll() is None
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with np.load(path, allow_pickle=False) as file:
        done = len(file["info_2_params"]) if "info_2_params" in file else 0
    whole = everything(run(means, None, done + 40))
    assert_same(everything(run(means, path, done + 40)), whole)


def test_a_finished_run_is_told_again_and_goes_on_with_more_steps(means, tmp_path):
    path = tmp_path / "run.npz"
    short = everything(run(means, path, 40))
    assert_same(everything(run(means, path, 40)), short)
    longer = everything(run(means, path, 60))
    assert_same(longer, everything(run(means, None, 60)))
    with pytest.raises(ValueError, match="has taken 60 steps, more than num_steps=40"):
        run(means, path, 40)


def test_what_dies_while_writing_leaves_the_last_whole_file(means, tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    whole = everything(run(means, None, 60))
    run(means, path, 40)

    def die(*args, **kwargs):
        args[0].write(b"half of a file")
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(np, "savez", die)
        run(means, path, 60)
    assert_same(everything(run(means, path, 60)), whole)


def test_another_model_data_start_option_or_version_is_refused(
    means, tmp_path, monkeypatch
):
    path = tmp_path / "run.npz"
    run(means, path, 20)

    def other(y=None):
        normal_means(y)
        numpyro.factor("more", -0.1)

    others = {
        "another model": lambda: run(JALAEM(other, num_particles=256), path),
        "other data": lambda: run(means, path, data=SCHOOLS + 1),
        "another rng_key": lambda: run(means, path, seed=1),
        "another rng_key or start": lambda: run(means, path, init_params={"mu": 1.0}),
        "other options": lambda: run(JALAEM(normal_means, num_particles=128), path),
    }
    for match, call in others.items():
        with pytest.raises(ValueError, match=match):
            call()
    monkeypatch.setattr(checkpoint, "version_of", lambda name: "0.0")
    with pytest.raises(ValueError, match="other versions.*not .*'jax': '0.0'"):
        run(means, path)


def test_a_model_is_known_by_the_numbers_it_closes_over(tmp_path):
    def make(known):
        def model(y):
            x = numpyro.sample("x", dist.Normal(numpyro.param("mu", 0.0), 1.0))
            numpyro.sample("y", dist.Normal(x + known, 1.0), obs=y)

        return JALAEM(model, optax.sgd(0.1), num_particles=8, num_islands=2)

    def identity(jala):
        made = jala._prepare(random.key(0), random.key(0), NOTHING_GIVEN, (SCHOOLS,), {})
        return checkpoint.identify(made, ())

    one = identity(make(np.arange(6.0)))
    assert one == identity(make(np.arange(6.0)))
    assert one.model != identity(make(np.arange(6.0)[::-1].copy())).model
    faster = make(np.arange(6.0))
    faster = JALAEM(faster.model, optax.sgd(0.2), num_particles=8, num_islands=2)
    assert one.model != identity(faster).model


def test_a_file_of_another_kind_is_refused_and_never_executed(means, tmp_path):
    path = tmp_path / "run.npz"
    path.write_text("a letter")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        run(means, path)

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.savez(path, header=np.array([Trap()], dtype=object))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        run(means, path)
    assert not (tmp_path / "sprung").exists()


def test_a_full_disk_does_not_lose_the_result(means, tmp_path, monkeypatch):
    whole = everything(run(means, None, 60))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="No space left.*The run goes on") as caught:
        run(means, tmp_path / "run.npz", 60)
    assert sum("No space" in str(w.message) for w in caught) == 1
    assert_same(everything(means), whole)
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_refused_at_once(means, tmp_path):
    for path in (tmp_path / "no" / "such.npz", tmp_path):
        with pytest.raises(ValueError, match="cannot be written"):
            run(means, path)
    with pytest.raises(ValueError, match="checkpoint_every=0"):
        means.run(random.key(0), 1, SCHOOLS, checkpoint=tmp_path / "a", checkpoint_every=0)


def test_a_process_that_fits_by_itself_keeps_its_own(means, tmp_path, monkeypatch):
    """Only processes that share a mesh leave the writing to the first of them."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run(means, tmp_path / "fit.npz", num_steps=20)
    assert (tmp_path / "fit.npz").exists()
