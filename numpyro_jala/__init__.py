"""Maximum marginal likelihood and evidence for NumPyro models."""

from numpyro_jala.inference import JALAEM

__all__ = ["JALAEM", "__version__"]
__version__ = "0.1.0"
