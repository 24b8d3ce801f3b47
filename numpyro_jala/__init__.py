"""Maximum marginal likelihood and evidence for NumPyro models."""

from numpyro_jala.comparison import compare, likelihood_ratio_test, print_comparison
from numpyro_jala.em import divide_scores
from numpyro_jala.inference import JALAEM
from numpyro_jala.rivals import IPLA, PGD, SFLA, SOUL

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
__version__ = "0.1.0"
