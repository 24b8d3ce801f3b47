"""Maximum marginal likelihood and evidence for NumPyro models."""

from numpyro_jala.backend.cache import set_program_cache
from numpyro_jala.baselines.algorithms import IPLA, PGD, SFLA, SOUL
from numpyro_jala.engine.em import divide_scores
from numpyro_jala.jalaem import JALAEM
from numpyro_jala.results.comparison import compare, likelihood_ratio_test, print_comparison
from numpyro_jala.results.random_effects import best_and_worst, random_effects

__all__ = [
    "IPLA",
    "JALAEM",
    "PGD",
    "SFLA",
    "SOUL",
    "__version__",
    "best_and_worst",
    "compare",
    "divide_scores",
    "likelihood_ratio_test",
    "print_comparison",
    "random_effects",
    "set_program_cache",
]
__version__ = "0.2.0"
