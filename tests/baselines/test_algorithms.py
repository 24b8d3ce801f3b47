"""The baselines against their own theory, in a model where that is in closed form."""

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.distributions import constraints
from scipy.optimize import brentq

from numpyro_jala import IPLA, PGD, SFLA, SOUL, compare, divide_scores, plots
from tests.tools import assert_mean

mpl.use("Agg")
Y = np.float32([2.3, -0.4, 1.1])
PRECISION, NOISE = 0.8, 2.5  # of the latents and of the data


def location(y):
    """Latents around a common mean; the potential is quadratic in all."""
    mean = numpyro.param("mean", 0.5)
    with numpyro.plate("rows", 3):
        x = numpyro.sample("x", dist.Normal(mean, PRECISION**-0.5))
        numpyro.sample("y", dist.Normal(x, NOISE**-0.5), obs=y)


def spread(y):
    """The scale of the latents, whose estimate depends on their variance."""
    log_sd = numpyro.param("log_sd", 0.3)
    with numpyro.plate("rows", y.shape[0]):
        x = numpyro.sample("x", dist.Normal(0, jnp.exp(log_sd)))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=y)


def final_means(baseline, num_steps, num_runs):
    """Return each run's parameter after so many steps, and its latents' means."""

    def one(key):
        start = baseline.init(key, Y)
        state = lax.fori_loop(0, num_steps, lambda _, s: baseline.update(s, Y)[0], start)
        return state.params[0], state.position[0].mean(0)

    return jax.jit(jax.vmap(one))(random.split(random.key(0), num_runs))


def mean_dynamics(num_steps, particle_step, param_step, moves_before=0):
    """The exact means of PGD's recursion, or of SOUL's with moves before each step."""
    theta, m = 0.5, np.full(3, 0.5)
    for _ in range(num_steps):
        scores, start = [], theta
        for _ in range(max(moves_before, 1)):
            if not moves_before:
                scores.append(PRECISION * np.sum(start - m))
            m = m - particle_step * (PRECISION * (m - start) + NOISE * (m - Y))
            if moves_before:
                scores.append(PRECISION * np.sum(start - m))
        theta = start - param_step * np.mean(scores)
    return theta, m


@pytest.mark.parametrize(
    ("baseline", "particle_step", "moves"),
    [
        (PGD(location, step_size=0.15, num_particles=4), 0.15, 0),
        (IPLA(location, step_size=0.15, num_particles=4), 0.15, 0),
        (
            SFLA(location, step_size=0.15, separation=2.0, inverse_temperature=50.0),
            0.075,
            0,
        ),
        (SOUL(location, step_size=0.15, num_particles=4), 0.15, 4),
    ],
    ids=["PGD", "IPLA", "SFLA", "SOUL"],
)
def test_means_follow_the_exact_recursion(baseline, particle_step, moves):
    theta, latents = final_means(baseline, 6, 4_000)
    exact, exact_latents = mean_dynamics(6, particle_step, 0.15, moves)
    assert_mean(theta, exact, resolution=0.05)
    if moves:  # the chain's states within one step differ in law
        return
    for column in range(3):
        assert_mean(latents[:, column], exact_latents[column], resolution=0.1)


@pytest.mark.parametrize(
    "baseline",
    [
        PGD(location, step_size=0.1, num_particles=8),
        IPLA(location, step_size=0.1, num_particles=8),
        SFLA(location, step_size=0.02, separation=0.2, inverse_temperature=8.0),
        SOUL(location, step_size=0.1, num_particles=8),
    ],
    ids=["PGD", "IPLA", "SFLA", "SOUL"],
)
def test_estimates_of_a_location_are_not_biased(baseline):
    theta, _ = final_means(baseline, 150 if baseline.num_particles == 8 else 750, 1_000)
    assert_mean(theta, Y.mean(), resolution=0.08)


def test_noise_of_the_params_has_the_variance_of_the_equations():
    stiff = optax.sgd(0.0)  # the noise alone moves them
    for baseline, variance in [
        (IPLA(location, stiff, step_size=0.3, num_particles=8), 2 * 0.3 / 8),
        (
            SFLA(location, stiff, step_size=0.3, separation=3.0, inverse_temperature=40.0),
            2 * 0.3 / 40,
        ),
    ]:
        theta, _ = final_means(baseline, 5, 4_000)
        assert_mean((theta - 0.5) ** 2 / (5 * variance), 1.0, resolution=0.1)
    theta, _ = final_means(PGD(location, stiff, step_size=0.3, num_particles=8), 5, 10)
    assert (theta == 0.5).all()


def stationary_sd(y, step_size):
    """Where the average of the scores vanishes, the particles in their biased law."""

    def excess(sd):
        precision = 1 + sd**-2
        second = (y / precision) ** 2 + 1 / (precision * (1 - step_size * precision / 2))
        return np.mean(second) - sd**2

    return brentq(excess, 1.0, 30.0)


@pytest.mark.parametrize("kind", [PGD, SOUL])
def test_estimates_are_biased_by_the_step_size_as_theory_says(kind):
    y = np.random.default_rng(1).normal(0, 2.5, 40).astype(np.float32)
    step_size = 0.4
    baseline = kind(spread, optax.sgd(0.002), step_size=step_size, num_particles=50)

    def one(key):
        start = baseline.init(key, y)
        state = lax.fori_loop(0, 400, lambda _, s: baseline.update(s, y)[0], start)
        return state.mean_params[0]

    found = jax.jit(jax.vmap(one))(random.split(random.key(1), 16))
    biased, exact = stationary_sd(y, step_size), stationary_sd(y, 0.0)
    assert abs(np.log(biased / exact)) > 0.02
    assert exact == pytest.approx(np.sqrt(np.mean(y**2) - 1), rel=1e-4)
    assert_mean(found, np.log(biased), resolution=0.02)


def test_run_gives_samples_a_path_and_no_evidence(capsys):
    baseline = PGD(location, step_size=0.1, num_particles=50)
    idata = baseline.run(random.key(0), 45, Y, progress_bar=False)
    assert idata["posterior"]["x"].shape == (1, 50, 3)
    assert idata["em_trace"]["mean"].shape == (45,)
    assert set(idata["em_trace"].data_vars) == {"mean", "grad_norm"}
    assert baseline.params["mean"] == pytest.approx(idata["estimate"]["mean"].values[0])
    assert np.allclose(np.exp(baseline.get_weighted_samples()[1]), 1 / 50)
    for ask in (
        lambda: baseline.log_evidence,
        lambda: baseline.log_evidence_se,
        baseline.standard_errors,
        baseline.diagnostics,
    ):
        with pytest.raises(ValueError, match="PGD gives no .*Use JALAEM"):
            ask()
    with pytest.raises(ValueError, match="no attribute 'log_evidence'"):
        compare({"one": idata, "two": idata})
    for draw in (plots.plot_log_evidence, plots.plot_ess, plots.plot_islands):
        with pytest.raises(ValueError, match="neither weights nor a log-evidence"):
            draw(idata)
    (axis,) = plots.plot_params(idata)
    np.testing.assert_allclose(axis.lines[0].get_ydata(), idata["em_trace"]["mean"])
    baseline.print_summary()
    assert "PGD gives neither standard errors nor evidence" in capsys.readouterr().out


def test_a_run_goes_on_where_another_stopped_to_the_same_numbers():
    baseline = SOUL(location, step_size=0.1, num_particles=5)
    baseline.run(random.key(0), 12, Y, progress_bar=False)
    half = baseline.last_state
    baseline.run(random.key(1), 9, Y, progress_bar=False, init_state=half)
    parts = baseline.last_state
    baseline.run(random.key(0), 21, Y, progress_bar=False)
    jax.tree.map(np.testing.assert_array_equal, parts.params, baseline.last_state.params)
    np.testing.assert_array_equal(parts.position, baseline.last_state.position)


def test_particles_that_are_given_are_the_first():
    given = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    state = PGD(location, step_size=0.1, num_particles=6).init(
        random.key(0), Y, init_particles={"x": given}, init_params={"mean": 2.0}
    )
    np.testing.assert_allclose(state.position[0], given, rtol=1e-6)
    assert state.params == pytest.approx(2.0)


def test_a_step_size_too_large_is_named():
    baseline = PGD(location, step_size=50.0, num_particles=4)
    with pytest.raises(RuntimeError, match="not finite .* step_size=50.0 is too large"):
        baseline.run(random.key(0), 200, Y, progress_bar=False)
    assert np.isfinite(baseline.last_state.position).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_size": -0.1}, "step_size=-0.1 is not positive"),
        ({"step_size": 0.1, "num_particles": 0}, "num_particles=0 has nothing to move"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        PGD(location, **options)


def test_bad_options_of_sfla_are_refused():
    with pytest.raises(ValueError, match="separation=0.0 is not positive"):
        SFLA(location, step_size=0.1, separation=0.0, inverse_temperature=1.0)


def test_scores_are_divided_by_site():
    scores = {"a": jnp.asarray([4.0, 2.0]), "b": jnp.asarray(3.0)}
    transform = divide_scores({"a": 8.0})
    divided, _ = transform.update(scores, transform.init(scores))
    np.testing.assert_allclose(divided["a"], [0.5, 0.25])
    assert divided["b"] == 3.0


def test_constrained_params_and_latents_are_seen_as_the_model_has_them():
    def model(y):
        rate = numpyro.param("rate", 2.0, constraint=constraints.positive)
        with numpyro.plate("rows", y.shape[0]):
            x = numpyro.sample("x", dist.Gamma(2.0, rate))
            numpyro.sample("y", dist.Poisson(x), obs=y)

    y = np.asarray([1, 4, 0, 2])
    baseline = PGD(model, step_size=0.02, num_particles=64)
    baseline.run(random.key(0), 40, y, progress_bar=False)
    samples = baseline.get_samples()["x"]
    assert samples.shape == (64, 4) and (samples > 0).all()
    assert baseline.params["rate"] > 0
