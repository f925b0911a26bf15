"""Hooks of mkdocs.yml: pages of the repository's root join the site, and a link to code becomes its path."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ["CONTRIBUTING.md", "CHANGELOG.md"]
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, with links that are right from docs/. The first page is docs/index.md."""
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text().replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links that would leave docs/. A link to a page of the root stays in the site; any other becomes the
    path of the file.
    """
    pages = {file.src_uri for file in files}
    # the parts at odd places are code, which may look like a link
    parts = re.split(r"(```.*?```|`[^`\n]+`(?!\]))", markdown, flags=re.S)
    up = "../" * page.file.src_uri.count("/")
    parts[::2] = [LINK.sub(lambda link: _link(link, pages, up), part) for part in parts[::2]]
    return "".join(parts)


def _link(link: re.Match, pages: set[str], up: str) -> str:
    """Return a link in the form that the site needs; `up` leads from the link's page to the first page's folder. A link
    whose target does not exist is returned unchanged, and fails the build.
    """
    text, target = link[1], re.sub(r"^(\.\./)+", "", link[2])
    if target == "README.md":
        target = "index.md"
    if target in pages:
        return f"[{text}]({up}{target}{link[3] or ''})"
    if not (ROOT / target).exists():
        return link[0]
    return f"`{target}`" if text.strip("`") == target else f"{text} (`{target}`)"
