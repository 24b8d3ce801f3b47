"""From a NumPyro model to densities.

A model and its data come in; potentials, draws from the prior, and maps between
unconstrained and constrained values go out, or a sentence that says what cannot work.
"""
