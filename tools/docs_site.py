"""What the documentation's site needs beyond mkdocs.yml: a hook for links and an extension for docstrings.

Pages link to files of the repository that are no pages. The site shows these as paths. Docstrings are written with
roles (``:class:`Budget```) and end a line with ``::`` before code; the site is made from Markdown.
"""

import posixpath
import re
from typing import Any

import griffe
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([^`]+)`")


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Replace links that leave ``docs/`` by their text and the path in the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def plain(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return _LINK.sub(plain, markdown)


class Markdown(griffe.Extension):
    """Docstrings become Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring when its object was read from the source."""
        if obj.docstring:
            text = _ROLE.sub(lambda role: f"`{_shown(role)}`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _shown(role: re.Match[str]) -> str:
    return role[2].rpartition(".")[2] if role[1] else role[2]
