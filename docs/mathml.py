"""Show formulas as MathML, which browsers render by themselves, without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

#: Browsers do not know MathML's attribute for these letters.
_DOUBLE_STRUCK = {"E": "𝔼", "R": "ℝ"}


def _to_mathml(latex: str, display: str) -> str:
    """Turn LaTeX into MathML, and fail the build on a command that is not understood."""
    # The converter knows the outer environment only.
    found = convert(latex.replace("{aligned}", "{align*}"), display=display)
    if "\\" in found or "<mi>&</mi>" in found:
        raise ValueError(f"A formula has a command that MathML has no word for: {latex}")
    letter = r'<mi mathvariant="double-struck">(.)</mi>'
    return re.sub(letter, lambda m: f"<mi>{_DOUBLE_STRUCK[m.group(1)]}</mi>", found)


def _visit_inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_to_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def _visit_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{_to_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
