"""Small pictures of posteriors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

#: Most elements of a site that are drawn.
MOST = 4


def draw(values: Any, path: Path) -> None:
    """Draw histograms of a site's posterior, at most four of its elements."""
    draws = np.asarray(values, float)
    draws = draws.reshape(draws.shape[0] * draws.shape[1], -1)[:, :MOST]
    low, high = np.nanquantile(draws, [0.002, 0.995])
    figure, axes = plt.subplots(figsize=(2.2, 1.3), layout="constrained")
    for column in draws.T:
        axes.hist(column, bins=30, range=(low, high), histtype="step", density=True)
    axes.set_yticks([])
    axes.set_xlabel(values.name, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["left", "right", "top"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=72, metadata={"Software": None})
    plt.close(figure)
