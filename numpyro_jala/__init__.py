"""Maximum marginal likelihood and evidence for NumPyro models."""

from numpyro_jala.comparison import compare, likelihood_ratio_test, print_comparison
from numpyro_jala.inference import JALAEM

__all__ = [
    "JALAEM",
    "__version__",
    "compare",
    "likelihood_ratio_test",
    "print_comparison",
]
__version__ = "0.1.0"
