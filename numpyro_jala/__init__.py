"""Maximum marginal likelihood and evidence for NumPyro models."""

from numpyro_jala.baselines.algorithms import IPLA, PGD, SFLA, SOUL
from numpyro_jala.engine.em import divide_scores
from numpyro_jala.jalaem import JALAEM
from numpyro_jala.results.comparison import compare, likelihood_ratio_test, print_comparison

__all__ = [
    "IPLA",
    "JALAEM",
    "PGD",
    "SFLA",
    "SOUL",
    "__version__",
    "compare",
    "divide_scores",
    "likelihood_ratio_test",
    "print_comparison",
]
__version__ = "0.2.0"
