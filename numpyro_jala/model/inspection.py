"""Look at a model before anything is compiled, and lay its sites out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_jala._typing import Array
from numpyro_jala.backend import blocks, compilation, precision
from numpyro_jala.model.arguments import Call, is_traced, split_call
from numpyro_jala.model.components import Components, Terms, find_components
from numpyro_jala.model.density import Layout
from numpyro_jala.model.dependence.find import find
from numpyro_jala.model.enumeration import check_masks, check_sum
from numpyro_jala.model.parametrisation import coordinates, find_scaled
from numpyro_jala.model.sites import (
    Site,
    SiteRecorder,
    Trace,
    in_control_flow,
    is_data,
    is_discrete,
    is_integer,
    is_masked,
    latent_sites,
    num_masked,
    plate_depth,
    run_once,
)
from numpyro_jala.model.supports import (
    flatten,
    free_coordinates,
    from_support,
    log_det_shares,
)

_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


def lay_out(
    model: Callable[..., Any],
    trace: Trace,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    matmul_precision: str | None = None,
    splits: bool = False,
    scales: bool = False,
) -> Layout:
    """Lay the sites of a trace out in flat vectors.

    With ``splits`` latents that are independent given the params form components, with
    ``scales`` they move in units of their prior where that has a latent scale.
    """
    moved = continuous_sites(trace)
    has_mask = any(is_masked(site) for site in moved.values())
    # What a mask leaves out depends on its values.
    keep_arrays = has_mask or _looks_at_values(model, args, kwargs)
    call, arrays = split_call(args, kwargs, keep_arrays)
    layout = _flat_layout(model, trace, call, _is_noisy(model, trace, args, kwargs))
    layout = replace(layout, precision=matmul_precision or precision.HIGHEST)
    program = _trace_density(layout, arrays)
    layout = replace(layout, width=blocks.widest(program))
    check_masks(layout, trace, arrays)
    check_sum(layout, trace, arrays)
    if matmul_precision is None:
        fastest = precision.choose(jax.default_backend(), program, layout.dim)
        rough_gradient = fastest == precision.THREE_PASSES
        layout = replace(layout, precision=fastest, rough_gradient=rough_gradient)
    layout = _hold_flat(layout, moved, arrays) if has_mask else layout
    if scales and not has_mask and not layout.discrete:
        layout = _in_scales(layout, trace, partial(model, *args, **kwargs))
    if splits and not layout.imputed:
        return replace(layout, components=components_of(layout, arrays))
    if not any(map(is_traced, [layout.anchor, *arrays])):
        _warn_of_indices(layout, arrays)
    return layout


def _flat_layout(
    model: Callable[..., Any], trace: Trace, call: Call, is_noisy: bool
) -> Layout:
    """Lay the sites of a trace out, before anything is known of their density."""
    params = param_values(trace)
    held = {name: value for name, value in params.items() if is_integer(value)}
    free = {name: value for name, value in params.items() if name not in held}
    supports = {
        name: trace[name]["kwargs"].get("constraint", constraints.real) for name in free
    }
    moved = continuous_sites(trace)
    discrete = tuple(name for name in latent_sites(trace) if name not in moved)
    has_scan = any(map(in_control_flow, trace.values()))
    init_params, unravel_params = flatten(from_support(free, supports))
    anchor, unravel_latents = flatten(
        {name: coordinates(site, ()) for name, site in moved.items()}
    )
    return Layout(
        model=model,
        call=call,
        latents=tuple(moved),
        constraints=supports,
        held=held,
        init_params=init_params,
        is_free=free_coordinates(unravel_params(init_params), supports),
        unravel_params=unravel_params,
        unravel_latents=unravel_latents,
        anchor=anchor,
        moving=None,
        held_log_det=0.0,
        imputed=(),
        discrete=discrete,
        enum_dim=-1 - plate_depth(trace) - has_scan,  # time takes an axis too
        draws_discrete=bool(discrete) and not has_scan,
        is_noisy=is_noisy,
        precision=precision.HIGHEST,
        rough_gradient=False,
        width=0,
        components=None,
    )


def _in_scales(layout: Layout, trace: Trace, model: Callable[[], Any]) -> Layout:
    """Put latents whose prior has a latent scale in units of it."""
    moved = continuous_sites(trace)
    scaled = find_scaled(model, trace, moved)
    anchor, unravel_latents = flatten(
        {name: coordinates(site, scaled) for name, site in moved.items()}
    )
    return replace(layout, scaled=scaled, anchor=anchor, unravel_latents=unravel_latents)


def param_values(trace: Trace) -> dict[str, Any]:
    """Return the params of a trace."""
    return {n: s["value"] for n, s in trace.items() if s["type"] == "param"}


def continuous_sites(trace: Trace) -> Trace:
    """Return the latents that particles have."""
    return {n: s for n, s in latent_sites(trace).items() if not is_discrete(s)}


def components_of(layout: Layout, arrays: list[Array]) -> Components | None:
    """Find the independent components of the latents.

    Of arrays that are traced the values are not known: then those that hold whatever they
    are.
    """
    if any(map(is_traced, arrays)):
        return components_without(layout, arrays, list(map(is_traced, arrays)))
    if is_traced(layout.anchor):  # the model itself holds what is traced
        return None
    at = layout.terms(arrays), layout.init_params, _moving_anchor(layout)
    return find_components(*at)


def components_without(
    layout: Layout, arrays: list[Array], unknown: list[bool]
) -> Components | None:
    """Find the components that hold whatever the values of some of the arrays.

    These are inputs of the program that is followed, as the params are. Where it has to be
    evaluated, to confirm what was found, other data stand in for those that are traced.
    """
    with jax.core.eval_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they would be about the stand-ins
        given = [_stand_in(i, each) for i, each in enumerate(arrays)]
        try:
            plain = _lay_out_again(layout, given)
        except Exception:  # a model that does not take them: one component is always right
            return None

        def terms(inputs: tuple[Array, list[Array]], position: Array) -> Terms:
            params, own = inputs[0], iter(inputs[1])
            pairs = zip(given, unknown, strict=True)
            whole = [next(own) if is_open else array for array, is_open in pairs]
            return plain.terms(whole)(params, position)

        own = [array for array, is_open in zip(given, unknown, strict=True) if is_open]
        at = (plain.init_params, own), plain.anchor
        return find_components(terms, *at)


def deciding(layout: Layout, arrays: list[Array]) -> list[int]:
    """Return which traced arrays decide by themselves how latents fall into components.

    Those with which there would be more of them, were their values known.
    """

    def count(known: int | None) -> int:
        unknown = [is_traced(each) and i != known for i, each in enumerate(arrays)]
        found = components_without(layout, arrays, unknown)
        return 1 if found is None else found.partition.num_components

    least = count(None)
    return [i for i, each in enumerate(arrays) if is_traced(each) and count(i) > least]


def _stand_in(number: int, array: Array) -> Array:
    """Return the array itself, or if it is traced, others of its kind."""
    if not is_traced(array):
        return array
    if jnp.issubdtype(array.dtype, jnp.floating):
        key = jax.random.fold_in(jax.random.key(1), number)
        return jax.random.normal(key, array.shape, array.dtype)
    return jnp.zeros(array.shape, array.dtype)


def _lay_out_again(layout: Layout, arrays: list[Array]) -> Layout:
    """Lay the sites out with other data, of which all is known."""
    args, kwargs = layout.call.fill(arrays)
    trace = run_once(layout.model, jax.random.key(0), args, kwargs)
    plain = _flat_layout(layout.model, trace, layout.call, layout.is_noisy)
    plain = replace(plain, precision=layout.precision)
    if not layout.scaled:
        return plain
    return _in_scales(plain, trace, partial(layout.model, *args, **kwargs))


def _warn_of_indices(layout: Layout, arrays: list[Array]) -> None:
    """Follow the program as if for components, which warns of an index beyond the end."""
    joint, temperature = layout.joint(arrays), jnp.ones(())

    def potential(params: Array, position: Array) -> Array:
        return joint(params, temperature, position)

    try:
        find(potential, layout.init_params, _moving_anchor(layout))
    except UserWarning:  # where warnings are errors
        raise
    except Exception:  # a program that cannot be followed
        return


def _moving_anchor(layout: Layout) -> Array:
    """Return where the latents that move are at first."""
    return layout.anchor if layout.moving is None else layout.anchor[layout.moving]


def _looks_at_values(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether the model needs the values of its arrays and not only their shapes."""
    call, arrays = split_call(args, kwargs, keep_arrays=False)

    def run_abstractly(values: list[Array]) -> int:
        filled_args, filled_kwargs = call.fill(values)
        run_once(model, jax.random.key(0), filled_args, filled_kwargs)
        return 0

    try:
        jax.eval_shape(run_abstractly, arrays)
    except _NEEDS_VALUES:
        return True
    return False


def _is_noisy(
    model: Callable[..., Any], trace: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Tell whether the model asks for random numbers once its params are known."""
    known = handlers.substitute(model, data=param_values(trace))
    watch = SiteRecorder()
    with watch:
        run_once(known, jax.random.key(0), args, kwargs)
    return watch.is_noisy


def _trace_density(layout: Layout, arrays: list[Array]) -> Jaxpr:
    """Evaluate the log-density on shapes alone, and return its program."""
    potential, one = layout.joint(arrays), jnp.ones((), layout.anchor.dtype)
    watch = SiteRecorder()
    try:
        with watch:
            at = layout.init_params, one, layout.anchor
            return jax.make_jaxpr(potential)(*at).jaxpr
    except _NEEDS_VALUES as error:
        raise ValueError(
            "The model asks for the value of a latent or a param, after site "
            f"{watch.last_site!r}, as in `if x > 0` or `float(x)`. It is compiled, and "
            "then there is none yet. Use jnp.where, or numpyro.contrib.control_flow.cond."
        ) from error
    except Exception as error:
        advice = (
            " NumPyro could not sum the discrete latents out. Continuous latents that are "
            "drawn within a scan are best drawn before it, all at once, and handed to it."
        )
        raise ValueError(
            f"The log-density of the model failed after site {watch.last_site!r}: "
            f"{type(error).__name__}: {error}{advice if layout.discrete else ''}"
        ) from error


def _hold_flat(layout: Layout, latents: Trace, arrays: list[Array]) -> Layout:
    """Leave out latents that a mask takes out of the joint density altogether."""
    if any(map(is_traced, [layout.anchor, *arrays])):
        raise ValueError(
            "A latent of the model is masked, and what is masked has to be seen before "
            "anything is compiled. Call run, outside of jax.jit and jax.vmap."
        )
    from_prior, from_joint, log_det = _slopes(layout, latents)
    columns = layout.columns()
    flat, imputed, held = np.zeros(layout.anchor.size, bool), [], 0.0
    for name, site in latents.items():
        index = columns[name]
        bare = is_masked(site) & (from_prior[index] == 0)
        if np.any(bare & (from_joint[index] != 0)):
            _check_imputed(layout, name, site)
            imputed.append(name)
            continue
        flat[index] = bare
        held += float(np.sum(log_det[index], where=bare))
    return replace(
        layout, moving=np.flatnonzero(~flat), held_log_det=held, imputed=tuple(imputed)
    )


def _slopes(layout: Layout, latents: Trace) -> tuple[np.ndarray, ...]:
    """Return the slopes of prior and joint density, and the Jacobians of the transforms.

    The slopes are those without the Jacobians, which a mask around the site takes away,
    and one of its distribution does not. Those taken away are zero.
    """
    potential = layout.joint([])
    one = jnp.ones((), layout.anchor.dtype)

    def jacobians(position: Array) -> Array:
        free = layout.unravel_position(position)
        shares = {name: log_det_shares(latents[name], free[name]) for name in free}
        return ravel_pytree(shares)[0]

    @partial(jax.jit, compiler_options=compilation.QUICK)
    def slopes(position: Array) -> tuple[Array, Array, Array, Array]:
        at_zero, at_one = (
            jax.grad(potential, 2)(layout.init_params, t * one, position) for t in (0, 1)
        )
        bend = jax.grad(lambda x: jacobians(x).sum())(position)
        return at_zero, at_one, bend, jacobians(position)

    at_zero, at_one, bend, log_det = map(np.asarray, slopes(layout.anchor))
    bend, log_det = (np.where(at_zero == 0, 0.0, each) for each in (bend, log_det))
    rounding = 1e-5 * np.abs(bend)

    def without(slope: np.ndarray) -> np.ndarray:
        return np.where(np.abs(slope + bend) <= rounding, 0.0, slope + bend)

    return without(at_zero), without(at_one), log_det


def _check_imputed(layout: Layout, name: str, site: Site) -> None:
    """Check that a masked latent fills gaps of an observed site, each entry one of them.

    Then its density is that of the observed site, and proper.
    """
    how_often = _times_observed(layout, name, site)
    if not how_often.any():
        raise ValueError(
            f"Latent site {name!r} is masked, which takes its prior away, but the "
            "likelihood depends on it: its prior is improper, and the evidence is "
            "not defined. Take the mask off, and NeuTraReparam, if that set it."
        )
    if int(num_masked(site)) != int(np.prod(site["fn"].batch_shape)):
        raise ValueError(
            f"Latent site {name!r} is masked in part and fills gaps of an observed site. "
            "Draw the entries that are masked and those that are not at two sites."
        )
    if not np.allclose(how_often, 1):
        raise ValueError(
            f"Latent site {name!r} is masked and a part of what an observed site has seen, "
            "but not each entry once and as it is, so that its density there is not that "
            "of the latent. Observe it as it was drawn, as in obs=x.at[missing].set(drawn)."
        )


def _times_observed(layout: Layout, name: str, site: Site) -> np.ndarray:
    """Return how the values of observed sites change with each entry of a latent."""
    args, kwargs = layout.call.fill([])

    def total(value: Array) -> Array:
        fixed = handlers.substitute(layout.model, data={name: value})
        sites = run_once(fixed, jax.random.key(0), args, kwargs).values()
        seen = [jnp.asarray(each["value"], float) for each in sites if is_data(each)]
        return sum((jnp.sum(each) for each in seen), jnp.zeros(()))

    return np.asarray(jax.grad(total)(jnp.asarray(site["value"], float)))
