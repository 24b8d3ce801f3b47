"""The tests, in this process and in those that it starts, compile by the flags of XLA."""

from numpyro_jala.backend import compilation

# A program's own options come before the flags.
compilation._SOON.clear()
