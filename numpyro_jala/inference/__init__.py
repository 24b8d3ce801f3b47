"""Run it: the only place that calls compiled programs, writes files, shows progress.

A model's densities and the user's options come in; a finished run goes out: estimates,
their information, the log-evidence, particles, and the record of every step.
"""
