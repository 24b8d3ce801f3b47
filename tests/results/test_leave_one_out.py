"""Groups of counts whose rates are gamma distributed: everything has a closed form."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.scipy.special import gammaln
from numpyro.distributions import constraints
from scipy.optimize import minimize

from numpyro_jala import IPLA, JALAEM
from numpyro_jala.engine.partition import joint
from numpyro_jala.results.leave_one_out import leave_one_group_out

NUM_GROUPS, ROWS = 60, 4


def counts_of_groups():
    rng = np.random.default_rng(3)
    rate = rng.gamma(1.5, 2.0, (NUM_GROUPS, 1))
    counts = rng.poisson(rate, (NUM_GROUPS, ROWS))
    counts[7] = 0, 21, 18, 25  # one group unlike the others
    return counts


COUNTS = counts_of_groups()


def model(counts):
    shape = numpyro.param("shape", 1.0, constraint=constraints.positive)
    pace = numpyro.param("pace", 1.0, constraint=constraints.positive)
    with numpyro.plate("groups", NUM_GROUPS):
        rate = numpyro.sample("rate", dist.Gamma(shape, pace))
    numpyro.sample("counts", dist.Poisson(rate[:, None]), obs=counts)


def log_evidence(logs, totals):
    """Return the log-evidence of each group but for a constant, given logs of the params."""
    a, b = jnp.exp(logs)
    first = a * logs[1] - gammaln(a) + gammaln(a + totals)
    return first - (a + totals) * jnp.log(b + ROWS)


@pytest.fixture(scope="module")
def fitted():
    jala = JALAEM(model)
    jala.run(random.key(0), None, COUNTS, progress_bar=False)
    return jala


@pytest.fixture
def exact(fitted):
    """The estimate as logarithms, the groups' totals and constants, in double precision."""
    with jax.enable_x64(True):
        totals = jnp.asarray(COUNTS.sum(1), jnp.float64)
        logs = jnp.log(
            jnp.array([float(fitted.params[name]) for name in ("shape", "pace")])
        )
        yield logs, totals, -np.asarray(gammaln(COUNTS + 1.0)).sum(1)


def test_evidences_and_influences_are_the_closed_forms(fitted, exact):
    logs, totals, constants = exact
    expected = np.asarray(log_evidence(logs, totals)) + constants
    score = np.asarray(jax.jacobian(log_evidence)(logs, totals))
    curvature = jax.hessian(lambda values: -log_evidence(values, totals).sum())(logs)
    influence = np.einsum("cp,pq,cq->c", score, np.linalg.inv(curvature), score)
    found = fitted.leave_one_group_out()
    groups = found.groups
    assert list(groups.index[[0, 59]]) == ["rate[0]", "rate[59]"]
    assert groups["log_evidence"].sum() == pytest.approx(fitted.log_evidence, abs=1e-6)
    error = np.abs(groups["log_evidence"] - expected)
    assert error.max() < 4 * fitted.log_evidence_se < 0.05
    np.testing.assert_allclose(groups["influence"], influence, atol=0.02, rtol=0.05)
    assert found.num_effective == pytest.approx(influence.sum(), rel=0.02)
    assert groups["influence"].idxmax() == "rate[7]"
    assert found.elpd == pytest.approx((expected - influence).sum(), abs=0.06)
    assert found.se == pytest.approx(NUM_GROUPS**0.5 * groups["elpd"].std())


def test_it_is_what_fitting_again_without_each_group_gives(fitted, exact):
    logs, totals, constants = exact
    fn = jax.jit(lambda values, counted: -(counted @ log_evidence(values, totals)))
    slope = jax.jit(jax.grad(fn))
    predicted = []
    for left in range(NUM_GROUPS):
        counted = jnp.ones(NUM_GROUPS).at[left].set(0.0)
        there = minimize(fn, np.asarray(logs), (counted,), jac=slope, tol=1e-9).x
        predicted.append(log_evidence(jnp.asarray(there), totals)[left])
    expected = np.array(predicted) + constants
    found = fitted.leave_one_group_out()
    # What is left is of second order in the influence of a group.
    missed = expected - found.groups["elpd"]
    assert np.all(np.abs(missed) < found.groups["influence"] ** 2 + 0.02)
    assert abs(missed.sum()) < 0.2 * found.num_effective


def with_result(fitted, by_component, partition=None):
    """Return a stand-in for the fitted run, with another result."""
    fixed, result = fitted._run.fixed, fitted._run.result
    layout = fixed.layout
    if partition is not None:
        layout = SimpleNamespace(partition=partition, dim=layout.dim)
    fixed = SimpleNamespace(layout=layout)
    return SimpleNamespace(fixed=fixed, result=result._replace(by_component=by_component))


def test_without_other_groups_there_is_a_sentence(fitted):
    with pytest.raises(ValueError, match="one component, of 60, and there is no other"):
        leave_one_group_out(with_result(fitted, None, joint(NUM_GROUPS)))
    with pytest.raises(ValueError, match="no log-evidence of its groups: with a single"):
        leave_one_group_out(with_result(fitted, None))
    alone = fitted._run.result.by_component._replace(influence=None)
    with pytest.raises(ValueError, match="The model has 2 params"):
        leave_one_group_out(with_result(fitted, alone))
    with pytest.raises(ValueError, match="IPLA gives no log-evidence of groups"):
        IPLA(model, step_size=0.1).leave_one_group_out()
