"""Small data sets, mostly those that are known from R's mixed models.

The name of a data set comes in; its columns go out, as NumPy arrays. Groups are numbered
from zero, as a plate wants them. ``README.md`` in this folder names the sources.
"""

from numpyro_jala.datasets.loaders import (
    load_bacteria,
    load_cbpp,
    load_digits,
    load_dyestuff,
    load_dyestuff2,
    load_epil,
    load_guimmun,
    load_nile,
    load_pastes,
    load_penicillin,
    load_sleepstudy,
)
from numpyro_jala.datasets.tables import read_table

__all__ = [
    "load_bacteria",
    "load_cbpp",
    "load_digits",
    "load_dyestuff",
    "load_dyestuff2",
    "load_epil",
    "load_guimmun",
    "load_nile",
    "load_pastes",
    "load_penicillin",
    "load_sleepstudy",
    "read_table",
]
