"""Refuse options and arguments that cannot work, by name and value."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from numpyro_jala.engine.resampling import SCHEMES
from numpyro_jala.model.density import Layout

#: Particles of an island: of two, the effective sample size cannot fall below a half.
FEWEST = 4
PRECONDITIONERS = ("auto", "dense", "diagonal", None)


def check_options(
    num_particles: int | None,
    num_islands: int,
    step_size: float | None,
    preconditioner: str | None,
    resampling: str,
    ess_threshold: float,
) -> None:
    """Check the options of the constructor."""
    num_particles = num_islands * FEWEST if num_particles is None else num_particles
    if num_islands < 1 or num_particles < 1 or num_particles % num_islands:
        raise ValueError(
            f"num_particles={num_particles} is not a multiple of num_islands="
            f"{num_islands}, and islands have equally many particles. Take "
            f"num_particles={max(1, num_particles // max(num_islands, 1)) * num_islands}."
        )
    size = num_particles // num_islands
    if num_islands > 1 and size < FEWEST:
        raise ValueError(
            f"num_particles={num_particles} in num_islands={num_islands} makes islands of "
            f"{size}, whose weights say little. Take num_particles of at least "
            f"{FEWEST * num_islands}, or fewer islands."
        )
    if num_islands < 2 and (step_size is None or preconditioner is not None):
        what = "step_size=None" if step_size is None else f"{preconditioner=}"
        raise ValueError(
            f"{what} asks for adaptation, and num_islands={num_islands} leaves no other "
            "island to learn from: what adapts on the particles it moves biases the "
            "evidence. Take more islands, or give a step_size and preconditioner=None."
        )
    if step_size is not None:
        check_positive("step_size", step_size)
    if preconditioner not in PRECONDITIONERS:
        raise ValueError(f"{preconditioner=} is not one of {PRECONDITIONERS}.")
    if resampling not in SCHEMES:
        raise ValueError(f"{resampling=} is not one of {tuple(SCHEMES)}.")
    if not 0 <= ess_threshold <= 1:
        raise ValueError(
            f"ess_threshold={ess_threshold} is not between 0 (never resample) and 1."
        )


def check_positive(name: str, value: float) -> None:
    """Check that an option is a positive number, unless JAX does not know it yet."""
    if not isinstance(value, jax.core.Tracer) and not value > 0:
        raise ValueError(f"{name}={value} is not positive.")


def check_num_steps(value: int) -> None:
    """Check that a number of steps is one."""
    if not isinstance(value, Integral) or value < 0:
        raise ValueError(
            f"num_steps={value!r} is not a number of steps: give an integer of zero, which "
            "holds the params still, or more."
        )


def check_ascent(num_steps: int | None, tol: float) -> None:
    """Check the number of steps, or how near the maximum is near enough."""
    if num_steps is not None:
        check_num_steps(num_steps)
    check_positive("tol", tol)


def check_can_tell(num_islands: int) -> None:
    """Check that an optimiser's run can tell whether it has arrived."""
    if num_islands < 2:
        raise ValueError(
            "num_steps=None asks for steps until the maximum is reached, which is told by "
            f"the spread of the islands, and there is num_islands={num_islands}. Give a "
            "number of steps, take more islands, or leave out optim."
        )


def check_annealing_effort(value: float) -> None:
    """Check that annealing takes at least the default number of moves."""
    if not 1 <= value < math.inf:
        raise ValueError(
            f"annealing_effort={value!r} is not a number of at least 1, which is the default pace."
        )


def check_components(value: str) -> None:
    """Check how the latents are to be taken."""
    if value not in ("auto", "joint"):
        raise ValueError(
            f"components={value!r} is neither 'auto', a weight for each independent "
            "component of the latents, nor 'joint', one for all of them."
        )


def check_mesh(mesh: Mesh | None, num_islands: int) -> None:
    """Check that the devices of a mesh can share the islands."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh={mesh!r} is not a jax.sharding.Mesh, or None.")
    if mesh is not None and num_islands % mesh.size:
        raise ValueError(
            f"num_islands={num_islands} cannot be shared by the {mesh.size} devices of "
            "mesh: each holds as many as the others. Take a multiple."
        )


def check_matmul_precision(name: str | None) -> None:
    """Check that JAX knows a precision of matrix products."""
    try:
        with jax.default_matmul_precision(name):
            pass
    except ValueError as error:
        raise ValueError(
            f"matmul_precision={name!r} is not one that JAX knows: {error}"
        ) from error


def check_baseline(name: str, num_particles: int, step_size: float) -> None:
    """Check what the algorithms without weights are given."""
    if num_particles < 1:
        raise ValueError(f"{name} with num_particles={num_particles} has nothing to move.")
    check_positive("step_size", step_size)


def check_init_params(values: dict[str, Any], constraints: dict[str, Any]) -> None:
    """Check that given starting values belong to params and satisfy their constraints."""
    unknown = sorted(set(values) - set(constraints))
    if unknown:
        raise ValueError(
            f"init_params names {unknown}, but the model's param sites are "
            f"{sorted(constraints)}."
        )
    for name, value in values.items():
        for leaf in jax.tree.leaves(value):
            if isinstance(leaf, jax.core.Tracer):
                continue  # its value is not known
            with jax.core.eval_context():
                inside = bool(jnp.all(constraints[name](jnp.asarray(leaf, float))))
            if not inside:
                raise ValueError(
                    f"init_params[{name!r}] = {np.asarray(leaf)} lies outside the site's "
                    f"constraint {constraints[name]}."
                )


def check_can_anneal(num_islands: int, preconditioner: str | None) -> None:
    """Check that the temperatures can be chosen by other islands."""
    if num_islands < 2 or preconditioner is None:
        raise ValueError(
            f"Annealing chooses temperatures from other islands and adapts its moves, "
            f"but num_islands={num_islands} and {preconditioner=}. Give init_particles "
            "and init_log_evidence, or take more islands and preconditioner='auto'."
        )


def check_can_bridge(num_islands: int) -> None:
    """Check that there are other islands to bridge to."""
    if num_islands < 2:
        raise ValueError(
            f"num_islands={num_islands} leaves no other island to bridge to. Use evaluate "
            "for the recursive estimate, or take more islands."
        )


def check_particles(
    particles: dict[str, Any], latents: tuple[str, ...], num_particles: int
) -> None:
    """Check that given particles name every latent, with the right leading axis."""
    if set(particles) != set(latents):
        raise ValueError(
            f"init_particles names {sorted(particles)}, but the model's latent sites are "
            f"{sorted(latents)}."
        )
    for name, value in particles.items():
        if np.shape(value)[:1] != (num_particles,):
            raise ValueError(
                f"init_particles[{name!r}] has shape {np.shape(value)}, but its leading "
                f"axis must be num_particles={num_particles}."
            )


def check_can_predict(layout: Layout) -> None:
    """Check that every site can be drawn."""
    if layout.discrete and not layout.draws_discrete:
        raise ValueError(
            f"The model has a scan, with which the discrete latents {list(layout.discrete)} "
            "are summed out and cannot be drawn, so there is nothing to predict from."
        )


def check_can_guide(layout: Layout) -> None:
    """Check that a guide sees the latents that the particles have."""
    if layout.discrete or layout.moving is not None:
        what = "discrete latents" if layout.discrete else "masked latents"
        raise ValueError(
            f"The model has {what}, which a guide does not see as this package does. Use "
            "reference='prior' or 'laplace'."
        )
