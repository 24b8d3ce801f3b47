"""Fit pairs of models, save them, and compare them in a new process with exact answers.

Run ``python examples/benchmarks/comparison.py --help``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import arviz
import mixed
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jax import random
from problems import coefficients, regression_data
from quadrature import float64, importance_sampling
from records import emit
from scipy import stats

from numpyro_jala import JALAEM, compare, likelihood_ratio_test

#: Twice the difference of lme4's maxima, -875.96967 and -897.03932.
LME4_STATISTIC = 42.1393


def error_model(kind: str, x: Any, y: Any) -> None:
    """Regress with Gaussian or Student-t noise, both variances to be estimated."""
    log_sigma2 = numpyro.param("log_sigma2", 1.0)
    log_alpha = numpyro.param("log_alpha", 1.0)
    mean, scale = coefficients(x, log_alpha, log_sigma2)
    noise = (
        dist.Normal(mean, scale) if kind == "normal" else dist.StudentT(4.0, mean, scale)
    )
    numpyro.sample("y", noise, obs=y)


def error_log_likelihood(kind: str, params: dict[str, float]) -> tuple[float, float]:
    """Integrate the coefficients out, with the error of the answer."""
    x, y = float64(*regression_data(is_student=True))
    scale = np.exp(0.5 * params["log_sigma2"])
    prior_sd = np.exp(-0.5 * params["log_alpha"])
    if kind == "normal":
        covariance = scale**2 * np.eye(y.size) + prior_sd**2 * x @ x.T
        return float(stats.multivariate_normal(cov=covariance).logpdf(y)), 0.0

    def log_joint(w: Any) -> Any:
        log_likelihood = stats.t.logpdf(y - w @ x.T, 4, scale=scale).sum(-1)
        return stats.norm.logpdf(w, scale=prior_sd).sum(-1) + log_likelihood

    start = np.linalg.lstsq(x, y, rcond=None)[0]
    return importance_sampling(log_joint, start, 20_000)


def fit(folder: Path, num_steps: int, seed: int) -> None:
    """Fit and save every model."""
    for name in ("sleepstudy_intercept", "sleepstudy_slope"):
        case = mixed.build(name)
        jala = JALAEM(case.model)
        idata = jala.run(random.key(seed), num_steps, *case.args, progress_bar=False)
        idata.to_netcdf(str(folder / f"{name}.nc"))
    for kind in ("normal", "student"):
        args = (kind, *regression_data(is_student=True))
        idata = JALAEM(error_model).run(
            random.key(seed), num_steps, *args, progress_bar=False
        )
        idata.to_netcdf(str(folder / f"{kind}.nc"))


def load(path: Path) -> Any:
    """Read a result with either generation of ArviZ."""
    if arviz.__version__.startswith("0."):
        return arviz.from_netcdf(str(path))
    return xr.load_datatree(path)


def check(folder: Path, seed: int) -> None:
    """Compare what is saved, and measure the errors."""
    small, large = (load(folder / f"sleepstudy_{n}.nc") for n in ("intercept", "slope"))
    test = likelihood_ratio_test(small, large)
    error = test.statistic - LME4_STATISTIC
    emit({"case": "sleepstudy", "seed": seed, "error": error, **test._asdict()})
    results = {kind: load(folder / f"{kind}.nc") for kind in ("normal", "student")}
    table = compare(results)
    exact = {}
    for kind, idata in results.items():
        estimate = idata["estimate"]
        params = {
            name: float(estimate[name].sel(statistic="estimate"))
            for name in ("log_sigma2", "log_alpha")
        }
        exact[kind] = error_log_likelihood(kind, params)
    worse = table.index[1]
    error = float(table["diff"][worse]) - (exact[table.index[0]][0] - exact[worse][0])
    emit(
        {
            "case": "error models",
            "seed": seed,
            "best": table.index[0],
            "diff": float(table["diff"][worse]),
            "diff_se": float(table["diff_se"][worse]),
            "error": error,
            "exact_se": exact["student"][1],
        }
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read", type=Path, help="a folder of saved results")
    options = parser.parse_args()
    if options.read is not None:
        check(options.read, options.seed)
    else:
        with tempfile.TemporaryDirectory() as name:
            fit(Path(name), options.steps, options.seed)
            reread = [sys.executable, __file__, "--read", name, "--seed", str(options.seed)]
            subprocess.run(reread, check=True)
