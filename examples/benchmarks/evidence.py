"""Compare ways to the log-evidence: error against cost, on problems with known answers.

The peers take turns, seed by seed, in one process; the first run of each is its cold one.
JSON lines; run ``python examples/benchmarks/evidence.py --help``.
"""

from __future__ import annotations

import argparse
import time
import warnings

import jax
import numpy as np
import problems
from bars import EVIDENCE_PROBLEMS
from peers import PEERS, Peer
from records import emit


def measure(peer: Peer, seed: int, exact: float) -> dict[str, float | None]:
    """Run once; return the error and the cost."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = peer(seed)
    seconds = time.perf_counter() - start
    return {
        "error": found.log_evidence - exact,
        "num_evaluations": found.num_evaluations,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--problems", nargs="*", choices=EVIDENCE_PROBLEMS, default=EVIDENCE_PROBLEMS
    )
    parser.add_argument("--peers", nargs="*", choices=tuple(PEERS), default=tuple(PEERS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--longest", type=float, default=20.0, help="seconds of one warm run"
    )
    options = parser.parse_args()
    for name in options.problems:
        problem = getattr(problems, name)()
        ways = [(p, size) for p in options.peers for size in PEERS[p][1]]
        runs = {way: PEERS[way[0]][0](problem, way[1]) for way in ways}
        # Some packages turn double precision on as they are imported.
        jax.config.update("jax_enable_x64", False)
        for seed in range(options.seeds + 1):
            for way in list(runs):
                found = measure(runs[way], seed, problem.log_evidence)
                peer, size = way
                where = {"problem": name, "peer": peer, "size": size, "seed": seed}
                emit({**where, "is_cold": seed == 0, **found})
                patience = options.longest * (10 if seed == 0 else 1)
                if not np.isfinite(found["error"]) or found["seconds"] > patience:
                    del runs[way]  # hopeless, or too slow


if __name__ == "__main__":
    main()
