"""Write the tables of stored results into the documentation.

``python examples/paper/page.py`` goes through ``docs/paper.md`` and puts the table of
``docs/paper/<name>/*.json`` between ``<!-- table: <name> -->`` and ``<!-- end -->``.
"""

import re
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text):
    """Put fresh tables between the marks of a page."""

    def table(match):
        folder = DOCS / "paper" / match[2]
        return f"{match[1]}\n{import_module(match[2]).tables(folder)}\n{match[3]}"

    return MARKS.sub(table, text)


def main():
    path = DOCS / "paper.md"
    path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
