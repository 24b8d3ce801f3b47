"""Metadata that is made when the package is built: the README, and the project's address.

Links of the README are relative, so that they work in a checkout of any branch. Package
indexes show the README alone, where a relative link leads nowhere. The address of the
repository is taken from the environment, where the release workflow sets it; a build that
does not know it has the text of these links, and no link.
"""

import os
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "NUMPYRO_JALA_REPOSITORY"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)")


def with_absolute_links(text, repository, version):
    """Point the relative links of a Markdown text to the files of a release.

    Parameters
    ----------
    text
        Markdown, whose relative links start at the root of the repository.
    repository
        Address of the repository, or nothing: then images go, and other links become
        plain text.
    version
        Version, whose tag is ``v`` and the version.
    """

    def replace(match):
        image, label, target = match.groups()
        if not repository:
            return "" if image else label
        kind = "raw" if image else "blob"
        return f"{image}[{label}]({repository.rstrip('/')}/{kind}/v{version}/{target})"

    return _LINK.sub(replace, text)


class BuildMetadata(MetadataHookInterface):
    """Fill in what ``pyproject.toml`` calls dynamic, other than the version."""

    def update(self, metadata):
        """Add the README and the links beside it."""
        repository = os.environ.get(ADDRESS, "")
        with open(os.path.join(self.root, "README.md"), encoding="utf-8") as file:
            text = with_absolute_links(file.read(), repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Repository": repository} if repository else {}
