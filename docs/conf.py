"""How Sphinx builds the pages."""

import os
import sys
from pathlib import Path
from urllib.request import urlopen

from numpyro_jala import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "numpyro_jala"
author = "The numpyro_jala developers"
copyright = "2026, the numpyro_jala developers"
version = release = __version__

extensions = [
    "mathml",  # beside this file
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_math_renderer = "mathml"
html_title = "numpyro_jala"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False


def _is_reachable(address: str) -> bool:
    """Tell whether a project's list of names can be read."""
    try:
        with urlopen(f"{address}objects.inv", timeout=5):
            return True
    except OSError:
        return False


# Names of other projects are links where their pages can be reached. Without a network they
# are plain text, and the build does not fail.
_PROJECTS = {
    "arviz": "https://python.arviz.org/en/stable/",
    "jax": "https://docs.jax.dev/en/latest/",
    "numpy": "https://numpy.org/doc/stable/",
    "numpyro": "https://num.pyro.ai/en/stable/",
    "optax": "https://optax.readthedocs.io/en/latest/",
    "pandas": "https://pandas.pydata.org/docs/",
    "xarray": "https://docs.xarray.dev/en/stable/",
}
intersphinx_mapping = {
    name: (address, None) for name, address in _PROJECTS.items() if _is_reachable(address)
}

# A cell that fails, or says anything on its error stream, fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_execution_show_tb = True
nb_output_stderr = "warn"

# For the kernels: ArviZ 0.x announces its successor at import, and tqdm misses its widgets;
# compiled programs are kept from one build to the next.
_BUILD = Path(__file__).parent / "_build"
os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore:IProgress not found"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_BUILD / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
