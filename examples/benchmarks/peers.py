"""Other ways to the log-evidence, each with one number that says how hard it tries.

A peer is made for a problem and a size, and then run with seeds; making it may compile.
All but PyMC see the same potential. The packages are not those of the project:
``pip install blackjax pymc jaxns==2.6.9``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.scipy.special import logsumexp
from jax.scipy.stats import multivariate_normal
from numpyro.infer import MCMC, NUTS
from problems import Evidence

from numpyro_jala import JALAEM
from numpyro_jala.engine import laplace as laplace_coordinates
from numpyro_jala.engine.banded import Band
from numpyro_jala.model.inspection import lay_out
from numpyro_jala.model.sites import run_once


class Found(NamedTuple):
    """A log-evidence, and how often the potential was evaluated, None if not known."""

    log_evidence: float
    num_evaluations: float | None


Peer = Callable[[int], Found]


class Density(NamedTuple):
    """A problem in unconstrained coordinates."""

    dim: int
    tempered: Callable[[Any, Any], Any]  # (temperature, position) -> potential
    draw_prior: Callable[[Any], Any]  # key -> position
    find_mode: Callable[[], Any]  # () -> mode, factor of the covariance there, steps

    def potential(self, position: Any) -> Any:
        """Return minus the log joint density."""
        return self.tempered(jnp.ones(()), position)


def density_of(problem: Evidence) -> Density:
    """Read a model without params as a density."""
    trace = run_once(problem.model, random.key(0), problem.args, {})
    layout = lay_out(problem.model, trace, problem.args, {})
    arrays = [jnp.asarray(array) for array in problem.args]
    none = layout.init_params
    joint = layout.joint(arrays)
    dense = Band(np.arange(layout.dim), layout.dim)

    def find_mode() -> Any:
        found = laplace_coordinates.find_mode(
            lambda x: joint(none, jnp.ones(()), x), dense, jnp.zeros(layout.dim)
        )
        return found.position, found.factor.inverse[0].T, found.num_steps

    return Density(
        layout.dim,
        lambda temperature, position: joint(none, temperature, position),
        lambda key: layout.draw_prior(key, none, arrays),
        jax.jit(find_mode),
    )


# -- ours -----------------------------------------------------------------------------------


def jala(problem: Evidence, size: int) -> Peer:
    """Run the package with its defaults; ``size`` is the number of particles."""
    fit = JALAEM(problem.model, num_particles=size)

    def run(seed: int) -> Found:
        fit.run(random.key(seed), 0, *problem.args, progress_bar=False)
        return Found(fit.log_evidence, fit.diagnostics()["num_evaluations"])

    return run


# -- Laplace, then importance sampling ------------------------------------------------------

_FREEDOM = 5.0


def laplace(problem: Evidence, size: int) -> Peer:
    """Draw ``size`` times from a Student-t at the mode."""
    density = density_of(problem)
    dim = density.dim

    @jax.jit
    def search() -> Any:
        return density.find_mode()

    @jax.jit
    def weigh(key: Any, mode: Any, root: Any) -> Any:
        normal_key, scale_key = random.split(key)
        scale = jnp.sqrt(2 * random.gamma(scale_key, _FREEDOM / 2, (size, 1)) / _FREEDOM)
        noise = random.normal(normal_key, (size, dim)) / scale
        half = (_FREEDOM + dim) / 2
        log_density = -half * jnp.log1p(jnp.sum(noise**2, -1) / _FREEDOM)
        log_density += lax.lgamma(half) - lax.lgamma(_FREEDOM / 2)
        log_density -= 0.5 * dim * jnp.log(_FREEDOM * jnp.pi)
        log_density -= jnp.linalg.slogdet(root)[1]
        ratios = -jax.vmap(density.potential)(mode + noise @ root.T) - log_density
        return logsumexp(ratios) - jnp.log(size)

    def run(seed: int) -> Found:
        mode, root, steps = search()
        found = float(weigh(random.key(seed), mode, root))
        return Found(found, int(steps) * (dim + 2) + size)

    return run


# -- NUTS, then bridge sampling -------------------------------------------------------------


def bridge(draws: Any, density: Density, key: Any) -> Any:
    """Bridge from draws to a Gaussian fitted on their first half (Meng and Wong 1996)."""
    half = len(draws) // 2
    mean, covariance = draws[:half].mean(0), jnp.cov(draws[:half].T, ddof=1)
    covariance = jnp.atleast_2d(covariance)
    new = random.multivariate_normal(key, mean, covariance, (half,))

    def ratio(x: Any) -> Any:
        potential = jax.vmap(density.potential)(x)
        return -potential - multivariate_normal.logpdf(x, mean, covariance)

    at_draws, at_new = ratio(draws[half:]), ratio(new)

    def refine(_: int, log_z: Any) -> Any:
        numerator = logsumexp(at_new - jnp.logaddexp(at_new, log_z))
        denominator = logsumexp(-jnp.logaddexp(at_draws, log_z))
        return numerator - denominator

    return lax.fori_loop(0, 100, refine, jnp.median(at_draws))


def nuts(problem: Evidence, size: int) -> Peer:
    """Run a chain of ``size`` draws after as many steps to warm up, at most 1,000."""
    density = density_of(problem)
    kernel = NUTS(potential_fn=density.potential)
    mcmc = MCMC(kernel, num_warmup=min(size, 1_000), num_samples=size, progress_bar=False)
    bridge_fn = jax.jit(lambda draws, key: bridge(draws, density, key))

    def run(seed: int) -> Found:
        first_key, run_key, bridge_key = random.split(random.key(seed), 3)
        first = density.draw_prior(first_key)
        fields = ("num_steps",)
        mcmc.run(run_key, init_params=first, extra_fields=fields)
        num_steps = float(mcmc.get_extra_fields()["num_steps"].mean())
        found = float(bridge_fn(mcmc.get_samples(), bridge_key))
        return Found(found, num_steps * (size + mcmc.num_warmup) + size)

    return run


# -- adaptive tempered SMC, moved by HMC ----------------------------------------------------

_LEAPS, _MOVES, _TARGET_ESS, _ACCEPTED = 5, 4, 0.7, 0.75


def tempered(problem: Evidence, size: int) -> Peer:
    """Temper ``size`` particles with blackjax; HMC learns its step and masses from them."""
    import blackjax
    from blackjax.smc import adaptive_tempered, extend_params
    from blackjax.smc.resampling import systematic
    from blackjax.smc.tempered import init

    density = density_of(problem)

    def log_prior(x: Any) -> Any:
        return -density.tempered(jnp.zeros(()), x)

    def log_likelihood(x: Any) -> Any:
        return density.tempered(jnp.zeros(()), x) - density.potential(x)

    kernel = adaptive_tempered.build_kernel(
        log_prior,
        log_likelihood,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        systematic,
        _TARGET_ESS,
    )

    @jax.jit
    def anneal(key: Any) -> Any:
        draw_key, key = random.split(key)
        particles = jax.vmap(density.draw_prior)(random.split(draw_key, size))

        def unfinished(carry: Any) -> Any:
            return carry[1].tempering_param < 1

        def step(carry: Any) -> Any:
            key, state, log_z, step_size, count = carry
            key, step_key = random.split(key)
            tuned = {
                "step_size": step_size,
                "inverse_mass_matrix": jnp.var(state.particles, 0),
                "num_integration_steps": _LEAPS,
            }
            state, info = kernel(step_key, state, _MOVES, extend_params(tuned))
            accepted = info.update_info.acceptance_rate.mean()
            step_size = step_size * jnp.exp(2 * (accepted - _ACCEPTED))
            log_z = log_z + info.log_likelihood_increment
            return key, state, log_z, step_size, count + 1

        first_size = jnp.asarray(1.0 / density.dim**0.25)
        first = (key, init(particles), jnp.zeros(()), first_size, jnp.zeros((), int))
        _, _, log_z, _, count = lax.while_loop(unfinished, step, first)
        return log_z, count

    def run(seed: int) -> Found:
        log_z, count = anneal(random.key(seed))
        return Found(float(log_z), int(count) * size * _MOVES * (_LEAPS + 1))

    return run


# -- nested sampling ------------------------------------------------------------------------


def nested(problem: Evidence, size: int) -> Peer:
    """Run jaxns through NumPyro with ``size`` live points."""
    import jaxns  # noqa: F401  (NumPyro imports it late)
    from numpyro.contrib.nested_sampling import NestedSampler

    def run(seed: int) -> Found:
        sampler = NestedSampler(problem.model, constructor_kwargs={"num_live_points": size})
        sampler.run(random.key(seed), *problem.args)
        results = sampler._results
        count = float(results.total_num_likelihood_evaluations)
        return Found(float(results.log_Z_mean), count)

    return run


# -- PyMC -----------------------------------------------------------------------------------


def pymc_model(name: str, args: tuple[Any, ...]) -> Any:
    """Write a problem in PyMC."""
    import pymc as pm

    scale = np.exp(0.5)
    with pm.Model() as model:
        if name in ("gaussian", "student"):
            x, y = args
            w = pm.Normal("w", 0.0, np.exp(-0.5), shape=x.shape[1])
            mean = pm.math.dot(x, w)
            if name == "gaussian":
                pm.Normal("y", mean, scale, observed=y)
            else:
                pm.StudentT("y", nu=4.0, mu=mean, sigma=scale, observed=y)
        elif name == "wisconsin":
            x, y = args
            w = pm.Normal("w", 0.0, np.sqrt(5.0), shape=x.shape[1])
            pm.Bernoulli("y", logit_p=pm.math.dot(x, w), observed=y)
        elif name == "eight_schools":
            spread, y = args
            mu, tau = pm.Normal("mu", 0.0, 5.0), pm.HalfCauchy("tau", 5.0)
            z = pm.Normal("z", 0.0, 1.0, shape=len(y))
            pm.Normal("y", mu + tau * z, spread, observed=y)
        else:
            x, y = args
            b = pm.Normal("b", 0.0, 2.0, shape=2)
            u = pm.Normal("u", 0.0, 0.5, shape=(len(y), 1))
            pm.Poisson("y", pm.math.exp(b[0] + b[1] * x + u), observed=y)
    return model


def pymc(problem: Evidence, size: int) -> Peer:
    """Run ``sample_smc`` with ``size`` draws, one chain."""
    import pymc as pm

    name = problem.model.__name__.removesuffix("_model")
    model = pymc_model(name, problem.args)

    def run(seed: int) -> Found:
        with model:
            found = pm.sample_smc(
                size, chains=1, cores=1, random_seed=seed, progressbar=False
            )
        steps = found.sample_stats["log_marginal_likelihood"].values.ravel()[-1]
        return Found(float(np.ravel(steps)[-1]), None)

    return run


#: Peers, and the sizes to try.
PEERS: dict[str, tuple[Callable[[Evidence, int], Peer], tuple[int, ...]]] = {
    "jala": (jala, (512,)),
    "laplace": (laplace, (1_000, 10_000, 100_000)),
    "nuts": (nuts, (1_000, 4_000, 16_000)),
    "blackjax": (tempered, (1_000, 4_000, 16_000)),
    "pymc": (pymc, (2_000, 8_000)),
    "jaxns": (nested, (100, 400, 1_600)),
}
