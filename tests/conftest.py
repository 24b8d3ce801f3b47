"""Settings that have to be made before JAX is imported."""

import os

# XLA's thread pool can wait for itself for ever in large vmapped programs on few cores,
# and the tests run in parallel anyway.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
