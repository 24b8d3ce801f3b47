"""Programs are kept, but not those of every model there ever was."""

import gc
import threading
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.stats import norm

from numpyro_jala import JALAEM, PGD
from numpyro_jala.backend import compilation
from numpyro_jala.engine.banded import Band
from numpyro_jala.inference import programs, record, reference


def means(y):
    """Means around `centre`, each seen once."""
    centre = numpyro.param("centre", 0.0)
    with numpyro.plate("data", len(y)):
        z = numpyro.sample("z", dist.Normal(centre, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


@pytest.fixture
def look(monkeypatch):
    """Begin a run, which then calls a program: return how often that was compiled."""
    compiled = []

    @jax.jit
    def double(x):
        compiled.append(x)
        return 2 * x

    def begin(fitter, *args):
        double(jnp.ones(()))
        raise KeyboardInterrupt

    monkeypatch.setattr(JALAEM, "_inspect", begin)
    monkeypatch.setattr(PGD, "_inspect", begin)

    def run(fitter, share):
        monkeypatch.setattr(compilation, "share_of_maps", lambda: share)
        with pytest.raises(KeyboardInterrupt):
            fitter.run(random.key(0), 1, np.zeros(2), progress_bar=False)
        return len(compiled)

    return run


def test_programs_are_kept_until_a_run_finds_no_room(look):
    jala, baseline = JALAEM(means), PGD(means, None, step_size=0.1)
    jala._fixed["another"] = None
    assert [look(each, 0.1) for each in (jala, baseline, jala)] == [1, 1, 1]
    assert jala._fixed
    assert [look(each, 0.9) for each in (jala, baseline)] == [2, 3]
    assert not jala._fixed


def test_the_pure_interface_which_may_be_traced_forgets_nothing(monkeypatch):
    monkeypatch.setattr(compilation, "share_of_maps", lambda: 0.9)
    for fitter in (JALAEM(means), PGD(means, None, step_size=0.1)):
        fitter._fixed["another"] = None
        jax.eval_shape(fitter.init, random.key(0), np.zeros(2))
        assert "another" in fitter._fixed


@pytest.mark.skipif(compilation.share_of_maps() == 0, reason="maps are not to be seen here")
def test_what_is_forgotten_gives_memory_and_maps_back(monkeypatch):
    gc.collect()
    before = compilation.share_of_maps()
    layouts = []
    for size in range(1, 6):
        fixed, arrays, _ = JALAEM(means)._inspect(random.key(0), (np.zeros(size),), {})
        layouts.append(weakref.ref(fixed.layout))
        programs.constrain_trace(fixed, jnp.zeros((2, 1)))
    del fixed
    taken = compilation.share_of_maps()
    assert before < taken
    assert not compilation.make_room()
    monkeypatch.setattr(compilation, "_ENOUGH", 0.0)
    assert compilation.make_room()
    gc.collect()
    assert compilation.share_of_maps() < taken
    assert not any(layout() for layout in layouts)


def test_data_that_a_model_finds_around_it_may_change():
    around = {"y": np.array([0.3, -1.0], np.float32)}
    jala = JALAEM(lambda: means(around["y"]))
    first = jala._inspect(random.key(0), (), {})[0]
    assert jala._inspect(random.key(1), (), {})[0] is first
    around["y"] = around["y"] + 1
    second = jala._inspect(random.key(1), (), {})[0]
    assert second is not first
    assert jala._inspect(random.key(2), (), {})[0] is second


def test_data_around_a_model_may_depend_on_its_latents_or_be_traced():
    def residual():
        z = numpyro.sample("z", dist.Normal(numpyro.param("centre", 0.0), 1.0))
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=z - 1.0)

    jala = JALAEM(residual)
    first = jala._inspect(random.key(0), (), {})[0]
    assert jala._inspect(random.key(1), (), {})[0] is first

    def potential(y):
        problem, _ = JALAEM(lambda: means(y))._problem((), {})
        return problem.potential_fn(jnp.zeros(1), jnp.ones(1), jnp.zeros(2))

    y = jnp.array([[0.5, 1.0], [2.0, -1.0]])
    expected = (y**2).sum(1) / 2 + 2 * jnp.log(2 * jnp.pi)
    np.testing.assert_allclose(jax.vmap(potential)(y)[:, 0], expected, rtol=1e-6)


def test_the_laplace_reference_is_compiled_once():
    y = np.array([0.3, -1.0, 2.0], np.float32)
    jala = JALAEM(means)
    fixed, arrays, _ = jala._inspect(random.key(0), (y,), {})
    layout = replace(fixed.layout, pattern=Band(np.arange(3), 3))
    at = reference.make("laplace", random.key(0), layout, jnp.zeros(1), arrays)
    size = reference._find_mode.num_compiled
    again = reference.make("laplace", random.key(0), layout, jnp.ones(1), arrays)
    assert reference._find_mode.num_compiled == size
    np.testing.assert_allclose(again.mode - at.mode, 0.5, rtol=1e-4)


@pytest.mark.parametrize("components", ["joint", "auto"])
@pytest.mark.parametrize("given", [False, True])
def test_what_is_compiled_ahead_is_what_the_run_calls(
    monkeypatch, compilations, given, components
):
    called = Counter()

    class Watched(compilation.Programs):
        def ready(self, program):
            ready = super().ready(program)

            def call(*args):
                # Others may be compiled beside it meanwhile.
                before = compilations.count(threading.get_ident())
                found = ready(*args)
                after = compilations.count(threading.get_ident())
                called[program.__name__] += after - before
                return found

            return call

    monkeypatch.setattr(record, "Programs", Watched)
    monkeypatch.setattr(compilation, "pays_ahead", lambda: True)
    y = np.array([0.3, -1.0, 2.0], np.float32)
    jala = JALAEM(means, num_particles=256, num_islands=4, components=components)
    first = {}
    if given:  # the posterior where the centre is zero
        draws = norm(y / 2, 0.5**0.5).rvs((256, 3), random_state=0)
        known = norm(0, 2**0.5).logpdf(y).sum()
        first = {"init_particles": {"z": draws}, "init_log_evidence": known}
    jala.run(random.key(0), 20, y, progress_bar=False, **first)
    start = "initial_state_given" if given else "initial_state"
    expected = {start: 0, "run_steps": 0, "louis": 0, "fit_loo": 0}
    if components == "joint":
        expected |= {"bridge_to": 0, "weigh": 0}
    else:
        expected |= {"score": 0, "sample": 0, "weigh": 0, "redraw": 0}
    assert called == expected
    assert not jala._run.programs._begun


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    level = {"xla_backend_optimization_level": 1}
    wanted = {"cpu": {**level, "xla_cpu_no_such_option": True}, "gpu": {"other": 2}}
    monkeypatch.setattr(compilation, "_SOON", wanted)
    compilation.options_to_compile_soon.cache_clear()
    assert compilation.options_to_compile_soon() == level
    compilation.options_to_compile_soon.cache_clear()


def test_a_program_takes_its_options_along_but_not_into_another(monkeypatch):
    seen = []
    compiled = jax.jit

    def watch(*args, **options):
        seen.append(options.get("compiler_options"))
        return compiled(*args, **options)

    level = {"xla_backend_optimization_level": 1}
    monkeypatch.setattr(jax, "jit", watch)
    monkeypatch.setattr(compilation, "options_to_compile_soon", lambda: level)
    double = compilation.program(static_argnums=0)(lambda shift, x: shift + 2 * x)
    assert double(1, 3.0) == 7
    assert compiled(lambda x: double(1, x))(3.0) == 7  # nested options are an error
    np.testing.assert_allclose(jax.vmap(lambda x: double(1, x))(np.arange(2.0)), [1, 3])
    assert seen == [None, level]


def test_one_core_or_an_accelerator_compiles_in_turn(monkeypatch):
    def pays(platform, cores):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(compilation, "num_cores", lambda: cores)
        return compilation.pays_ahead()

    assert [pays("cpu", 1), pays("cpu", 2), pays("gpu", 8)] == [False, True, False]


def test_what_fails_to_compile_fails_where_it_is_called():
    programs = compilation.Programs()
    failing = SimpleNamespace(compile=lambda: 1 / 0, out_info="shapes")
    program = Mock(lower=lambda size: failing)
    assert programs.begin(program, 3) == "shapes"
    with pytest.raises(ZeroDivisionError):
        programs.ready(program)
    assert programs.ready(program) is program
