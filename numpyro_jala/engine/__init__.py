"""The algorithm: pure functions of arrays, to be jitted.

A potential, weighted particles and parameters come in; they go out one step further, with
what happened on the way. Nothing here knows NumPyro, ArviZ, files or progress bars.
"""
