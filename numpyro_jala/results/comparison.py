"""Compare models by their evidence, and nested ones by their likelihood ratio."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import gammaincc

#: Kass and Raftery (1995), on twice the log of the Bayes factor.
_GRADES = (
    (2.0, "not worth more than a bare mention"),
    (6.0, "positive"),
    (10.0, "strong"),
    (np.inf, "very strong"),
)


def aic(log_likelihood: Any, num_params: Any) -> Any:
    """Return Akaike's criterion, smaller being better."""
    return 2 * num_params - 2 * log_likelihood


def bic(log_likelihood: Any, num_params: Any, num_observations: Any) -> Any:
    """Return Schwarz's criterion, NaN where observations cannot be counted."""
    return num_params * np.log(num_observations) - 2 * log_likelihood


class _Model(NamedTuple):
    log_evidence: float
    error: float
    num_params: int
    num_observations: float
    observed: dict[str, np.ndarray]
    failure: str = ""  # why there is no log-evidence


def _read(name: str, data: Any) -> _Model:
    """Read what a run wrote, as it is or loaded from a file."""
    attrs = dict(data.attrs)
    missing = {"log_evidence", "log_evidence_se", "num_params"} - attrs.keys()
    if missing:
        raise ValueError(
            f"The data of model {name!r} have no attribute {sorted(missing)[0]!r}. Give "
            "what JALAEM.run returned, or a file of it."
        )
    try:
        group = data["observed_data"]
    except KeyError:
        group = {}
    observed = {str(key): np.asarray(group[key]) for key in getattr(group, "data_vars", ())}
    return _Model(
        float(attrs["log_evidence"]),
        float(attrs["log_evidence_se"]),
        int(attrs["num_params"]),
        float(attrs.get("num_observations", np.nan)),
        observed,
        str(attrs.get("failure", "")),
    )


def _same_data(first: _Model, second: _Model) -> bool:
    """Tell whether two models have seen the same values, whatever the sites' names."""
    one, two = (
        sorted(
            (np.size(value), np.asarray(value).tobytes())
            for value in model.observed.values()
        )
        for model in (first, second)
    )
    return one == two


def compare(
    models: Mapping[str, Any], prior: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Compare models by their log-evidence, the best first.

    Parameters
    ----------
    models
        What ``JALAEM.run`` returned for each, or such data loaded from a file.
    prior
        Prior probabilities of the models, up to a constant; equal by default.

    Returns
    -------
    pandas.DataFrame
        One row a model: ``rank``, ``log_evidence`` and its Monte Carlo error ``se``,
        ``diff`` to the best and its error ``diff_se``, ``log_bayes_factor`` against the
        best, posterior ``probability``, ``num_params``, ``aic`` and ``bic``. Where params
        were estimated, the log-evidence is the maximised marginal log-likelihood. A run
        that failed comes last, has no log-evidence, and ``warning`` says why.

    Examples
    --------
    With stand-ins for what ``JALAEM.run`` returns:

    >>> import xarray as xr
    >>> def result(log_evidence):
    ...     known = {"log_evidence": log_evidence, "log_evidence_se": 0.01}
    ...     return xr.Dataset(attrs={**known, "num_params": 2, "num_observations": 50})
    >>> table = compare({"plain": result(-84.0), "robust": result(-81.0)})
    >>> print(table[["rank", "diff", "diff_se", "probability"]].round(3))
            rank  diff  diff_se  probability
    robust     0   0.0    0.000        0.953
    plain      1   3.0    0.014        0.047
    """
    if not models:
        raise ValueError("There is no model to compare.")
    found = {name: _read(name, data) for name, data in models.items()}
    prior = dict.fromkeys(found, 1.0) if prior is None else prior
    if set(prior) != set(found) or min(prior.values()) <= 0:
        raise ValueError(
            f"prior has {dict(prior)}, and must have a positive number for each of "
            f"{list(found)}."
        )
    names = sorted(
        found, key=lambda name: np.nan_to_num(-found[name].log_evidence, nan=np.inf)
    )
    ordered = [found[name] for name in names]
    table = _tabulate(names, ordered, [prior[name] for name in names])
    for sentence in _warning_messages(names, ordered, table):
        warnings.warn(sentence, stacklevel=2)
    return table


def _tabulate(names: list[str], ordered: list[_Model], prior: list[float]) -> pd.DataFrame:
    """Return a row for each model, the best first."""
    best = ordered[0]
    log_evidence = np.array([model.log_evidence for model in ordered])
    error = np.array([model.error for model in ordered])
    num_params = np.array([model.num_params for model in ordered])
    num_observations = np.array([model.num_observations for model in ordered])
    log_posterior = log_evidence + np.log(prior)
    share = np.exp(log_posterior - np.nanmax([*log_posterior, -np.inf]))
    diff_se = np.hypot(error, best.error)
    diff_se[0] = 0.0
    return pd.DataFrame(
        {
            "rank": np.arange(len(names)),
            "log_evidence": log_evidence,
            "se": error,
            "diff": best.log_evidence - log_evidence,
            "diff_se": diff_se,
            "log_bayes_factor": log_evidence - best.log_evidence,
            "probability": share / np.nansum(share),
            "num_params": num_params,
            "aic": aic(log_evidence, num_params),
            "bic": bic(log_evidence, num_params, num_observations),
            "warning": [model.failure for model in ordered],
        },
        index=names,
    )


def _warning_messages(
    names: list[str], models: list[_Model], table: pd.DataFrame
) -> list[str]:
    said = [
        f"Of {name!r} there is no log-evidence to compare: {model.failure}."
        for name, model in zip(names, models, strict=True)
        if model.failure
    ]
    best = models[0]
    for name, model in zip(names[1:], models[1:], strict=True):
        if not _same_data(best, model):
            said.append(
                f"{names[0]!r} and {name!r} have seen different data: their evidence cannot "
                "be compared."
            )
        if table["diff"][name] < 2 * table["diff_se"][name]:
            said.append(
                f"{names[0]!r} and {name!r} differ by {table['diff'][name]:.2f} nats with a "
                f"Monte Carlo error of {table['diff_se'][name]:.2f}, which could turn the "
                "order round. Take more particles."
            )
    if len({model.num_params > 0 for model in models}) == 2:
        said.append(
            "Some models have params, which were maximised, and some have none: a maximum "
            "is not penalised for its params, an integral is. Compare like with like."
        )
    elif best.num_params and len({model.num_params for model in models}) > 1:
        said.append(
            "The params were maximised and not integrated, so log_evidence is a maximised "
            "marginal log-likelihood and log_bayes_factor a log-likelihood ratio. Use aic, "
            "bic or likelihood_ratio_test for models with different numbers of params."
        )
    return said


def print_comparison(table: pd.DataFrame) -> None:
    """Print a comparison, with words for the Bayes factors (Kass and Raftery 1995)."""
    lines = [table.round(3).to_string(), ""]
    if table["num_params"].nunique() > 1:
        best = table["aic"].idxmin()
        lines.append(
            "The log-evidence does not pay for params that were maximised. By AIC, which "
            f"does, {best} is best."
        )
    else:
        for name in table.index[1:]:
            if np.isnan(table["diff"][name]):
                lines.append(f"Of {name} there is no log-evidence.")
                continue
            twice = 2 * table["diff"][name]
            grade = next((words for bound, words in _GRADES if twice <= bound), "unknown")
            lines.append(f"Evidence for {table.index[0]} against {name}: {grade}.")
    print("\n".join(lines))  # noqa: T201


class LikelihoodRatio(NamedTuple):
    """A likelihood-ratio test of a smaller model within a larger one.

    statistic, statistic_se
        Twice the difference of the log-likelihoods, and its Monte Carlo error.
    df
        Degrees of freedom: how many more params the larger model has.
    p_value
        From the chi-squared distribution with ``df`` degrees of freedom.
    p_value_boundary
        Where the smaller model sets one variance to zero, which is the edge of its
        range: from an equal mixture with ``df - 1`` degrees of freedom. A random slope
        with its correlation is such a case with ``df`` of two.
    """

    statistic: float
    statistic_se: float
    df: int
    p_value: float
    p_value_boundary: float


def _chi_squared_tail(statistic: float, df: int) -> float:
    if df == 0:
        return float(statistic <= 0)
    return float(gammaincc(df / 2, max(statistic, 0.0) / 2))


def likelihood_ratio_test(small: Any, large: Any) -> LikelihoodRatio:
    """Test a model against a larger one that contains it.

    Parameters
    ----------
    small, large
        What ``JALAEM.run`` returned for each, or such data loaded from a file.

    Examples
    --------
    With stand-ins for what ``JALAEM.run`` returns:

    >>> import xarray as xr
    >>> def result(log_evidence, num_params):
    ...     known = {"log_evidence": log_evidence, "log_evidence_se": 0.01}
    ...     return xr.Dataset(attrs={**known, "num_params": num_params})
    >>> test = likelihood_ratio_test(result(-84.0, 3), result(-81.0, 5))
    >>> print(f"{test.statistic:.1f} on {test.df}: p = {test.p_value:.3f}")
    6.0 on 2: p = 0.050
    """
    one, two = _read("small", small), _read("large", large)
    df = two.num_params - one.num_params
    if df < 1:
        raise ValueError(
            f"The small model has {one.num_params} params and the large one "
            f"{two.num_params}: the large one must have more."
        )
    if not _same_data(one, two):
        raise ValueError("The two models have seen different data.")
    statistic = 2 * (two.log_evidence - one.log_evidence)
    tail = _chi_squared_tail(statistic, df)
    return LikelihoodRatio(
        statistic,
        2 * float(np.hypot(one.error, two.error)),
        df,
        tail,
        0.5 * (tail + _chi_squared_tail(statistic, df - 1)),
    )
