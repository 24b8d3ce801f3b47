"""Write the tables of stored results into the documentation.

``python examples/paper/page.py`` goes through ``docs/paper.md`` and puts the table of
``docs/paper/<name>/*.json`` between ``<!-- table: <name> -->`` and ``<!-- end -->``.
"""

import re
from importlib import import_module
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
MARKS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def stored(name):
    """Return the table of an experiment's stored results."""
    return import_module(name).tables(DOCS / "paper" / name)


def fill(text, table_fn=stored):
    """Put fresh tables between the marks of a page."""
    return MARKS.sub(lambda mark: f"{mark[1]}\n{table_fn(mark[2])}\n{mark[3]}", text)


def main():
    path = DOCS / "paper.md"
    path.write_text(fill(path.read_text()))


if __name__ == "__main__":
    main()
