"""Log-evidences by long runs of NUTS in float64, for models without a closed form.

A mixture of Student t's is fitted to half of the draws in unconstrained space. Importance
sampling from it gives one estimate of the log-evidence, and a bridge between it and the
other half of the draws another [1]_. Nothing of ``numpyro_jala`` takes part.
``python examples/gallery/reference.py NAME ...`` adds to ``answers.json``.

.. [1] X.-L. Meng, W. H. Wong (1996). Simulating ratios of normalizing constants via a
   simple identity: a theoretical exploration. *Statistica Sinica* 6, 831-860.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from entry import Array, Entry
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_median
from numpyro.infer.util import initialize_model
from run import ANSWERS, load
from scipy import special, stats

#: Of the Student t's.
DEGREES = 6.0
NUM_CHAINS = 4
#: More latents than these, and the bridge is reported.
MANY = 12


class Mixture(NamedTuple):
    """A mixture of Student t's."""

    log_weight: Array  # (num_parts,)
    centre: Array  # (num_parts, dim)
    root: Array  # (num_parts, dim, dim)

    def log_parts(self, x: Array) -> Array:
        """Compute the log-density of each part, with its weight, at rows of ``x``."""
        dim = x.shape[-1]
        columns = []
        for weight, centre, root in zip(*self, strict=True):
            z = np.linalg.solve(root, (x - centre).T)
            tail = 0.5 * (DEGREES + dim) * np.log1p((z**2).sum(0) / DEGREES)
            columns.append(weight - np.log(np.diag(root)).sum() - tail)
        constant = special.gammaln(0.5 * (DEGREES + dim)) - special.gammaln(0.5 * DEGREES)
        return np.stack(columns, -1) + constant - 0.5 * dim * np.log(DEGREES * np.pi)

    def log_density(self, x: Array) -> Array:
        """Compute the log-density."""
        return special.logsumexp(self.log_parts(x), axis=-1)

    def draw(self, rng: np.random.Generator, num_draws: int) -> Array:
        """Draw from the mixture."""
        part = rng.choice(self.log_weight.size, num_draws, p=np.exp(self.log_weight))
        z = rng.normal(size=(num_draws, self.centre.shape[1]))
        z /= np.sqrt(rng.chisquare(DEGREES, num_draws) / DEGREES)[:, None]
        return self.centre[part] + np.einsum("nij,nj->ni", self.root[part], z)


def fit_mixture(x: Array, num_parts: int, num_rounds: int = 60) -> Mixture:
    """Fit a mixture by expectation and maximisation, from parts at random draws."""
    rng = np.random.default_rng(0)
    dim, whole = x.shape[1], np.cov(x.T).reshape(x.shape[1], -1)
    shrunk = whole / num_parts ** (2 / dim)
    mixture = Mixture(
        np.full(num_parts, -np.log(num_parts)),
        x[rng.choice(len(x), num_parts, replace=False)],
        np.repeat(np.linalg.cholesky(shrunk)[None], num_parts, 0),
    )
    for _ in range(num_rounds):
        parts = mixture.log_parts(x)
        share = np.exp(parts - special.logsumexp(parts, axis=-1, keepdims=True))
        count = share.sum(0) + 1e-9
        centre = share.T @ x / count[:, None]
        # a few draws of the whole in each part, lest one of them shrinks to a point
        prior = 4.0 * dim
        roots = [
            np.linalg.cholesky(
                ((x - c).T * share[:, k] @ (x - c) + prior * shrunk) / (count[k] + prior)
            )
            for k, c in enumerate(centre)
        ]
        mixture = Mixture(np.log(count / count.sum()), centre, np.stack(roots))
    return mixture


def unconstrained(entry: Entry) -> tuple[Callable[[Array], Array], Array]:
    """Return a log-density of vectors, and places for chains to start."""
    model, args = entry.collapsed or (entry.model, entry.args)
    args = jax.tree.map(widen, args)
    keys = random.split(random.key(1), NUM_CHAINS)
    strategy = init_to_median(num_samples=10)
    found = initialize_model(keys, model, model_args=args, init_strategy=strategy)
    one = jax.tree.map(lambda leaf: leaf[0], found.param_info.z)
    unravel = ravel_pytree(one)[1]
    starts = jax.vmap(lambda tree: ravel_pytree(tree)[0])(found.param_info.z)
    return lambda x: -found.potential_fn(unravel(x)), starts


def widen(leaf: Any) -> Any:
    """Make float64 of what is float32."""
    is_float = getattr(leaf, "dtype", None) == np.float32
    return np.asarray(leaf, np.float64) if is_float else leaf


def sample(log_density_fn: Callable[[Array], Array], starts: Array, num: int) -> Array:
    """Run NUTS from every start."""
    kernel = NUTS(
        potential_fn=lambda x: -log_density_fn(x), target_accept_prob=0.9, dense_mass=True
    )
    mcmc = MCMC(
        kernel,
        num_warmup=num // 2,
        num_samples=num,
        num_chains=NUM_CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    mcmc.run(random.key(2), init_params=starts)
    return np.asarray(mcmc.get_samples(group_by_chain=True))  # (chains, num, dim)


def bridge(target: Array, proposed: Array, num_effective: float) -> float:
    """Solve for the log-evidence, from log-ratios at draws of the target and others."""
    share = np.log(num_effective / (num_effective + proposed.size))
    rest = np.log(proposed.size / (num_effective + proposed.size))
    value = float(np.median(target))
    for _ in range(1000):
        above = proposed - np.logaddexp(share + proposed, rest + value)
        below = -np.logaddexp(share + target, rest + value)
        new = special.logsumexp(above) - np.log(proposed.size)
        new -= special.logsumexp(below) - np.log(target.size)
        if abs(new - value) < 1e-9:
            break
        value = float(new)
    return value


def pareto_shape(log_weight: Array) -> float:
    """Fit a Pareto distribution to the largest weights; below 0.7 their mean is reliable."""
    ordered = np.sort(log_weight)
    num_tail = int(min(0.2 * ordered.size, 3 * np.sqrt(ordered.size)))
    tail = np.exp(ordered[-num_tail:] - ordered[-1])
    excess = tail - np.exp(ordered[-num_tail - 1] - ordered[-1])
    return float(stats.genpareto.fit(excess, floc=0)[0])


def evaluate(log_density_fn: Callable[[Array], Array], x: Array) -> Array:
    """Evaluate the model, in pieces."""
    fn = jax.jit(jax.vmap(log_density_fn))
    pieces = np.array_split(x, max(1, len(x) // 4000))
    values = np.concatenate([np.asarray(fn(piece)) for piece in pieces])
    return np.where(np.isnan(values), -np.inf, values)


def integrate(entry: Entry, num: int, num_parts: int, num_draws: int) -> dict[str, Any]:
    """Estimate the log-evidence in both ways; report the better one."""
    log_density_fn, starts = unconstrained(entry)
    draws = sample(log_density_fn, starts, num)
    dim = draws.shape[-1]
    half = num // 2
    rng = np.random.default_rng(1)
    mixture = fit_mixture(draws[:, :half].reshape(-1, dim), num_parts)
    x = mixture.draw(rng, num_draws)
    proposed = evaluate(log_density_fn, x) - mixture.log_density(x)
    weight = np.exp(proposed - proposed.max())
    by_importance = float(proposed.max() + np.log(weight.mean()))
    importance_se = float(weight.std() / weight.mean() / np.sqrt(num_draws))
    bridges = []
    for chain, part in zip(
        draws[:, half:], np.array_split(proposed, NUM_CHAINS), strict=True
    ):
        target = evaluate(log_density_fn, chain) - mixture.log_density(chain)
        effective = float(min(effective_sample_size(target[None]), target.size))
        bridges.append(bridge(target, part, effective))
    found = {
        "bridge": float(np.mean(bridges)),
        "bridge_se": float(np.std(bridges, ddof=1) / np.sqrt(NUM_CHAINS)),
        "importance": by_importance,
        "importance_se": importance_se,
        "pareto_k": pareto_shape(proposed),
        "rhat": float(np.nanmax(gelman_rubin(draws))),
        "latents": dim,
    }
    name = "bridge" if dim > MANY or found["pareto_k"] > 0.6 else "importance"
    return {"log_evidence": found[name], "se": found[f"{name}_se"], "way": name} | found


def main(names: list[str], num: int, num_parts: int, num_draws: int, path: Path) -> None:
    """Integrate models, and keep the answers."""
    entries = load()
    for name in names:
        found = integrate(entries[name], num, num_parts, num_draws)
        stored = json.loads(path.read_text()) if path.exists() else {}
        rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}
        stored[name] = rounded
        path.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
        print(name, rounded, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--samples", type=int, default=2000, help="of each chain")
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--answers", type=Path, default=ANSWERS, help="the file to add to")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    main(options.names, options.samples, options.parts, options.draws, options.answers)
