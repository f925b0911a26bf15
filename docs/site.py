"""Hooks of mkdocs.yml: pages of the repository's root join the site, and a link to code becomes its path."""
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, with links as from docs/. README.md is the first page."""
    for name in PAGES:
        text = (ROOT / name).read_text().replace("](docs/", "](").replace('src="docs/', 'src="')
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links to the root's pages stay in the site, and write those to other files as the file's path."""
    markdown = re.sub(rf"\]\(\.\./({'|'.join(map(re.escape, PAGES))})", r"](\1", markdown)
    known = {file.src_uri for file in files}
    parts = re.split(r"(```.*?```|`[^`\n]+`(?!\]))", markdown, flags=re.S)  # code at odd places, which may look like a link
    parts[::2] = [LINK.sub(lambda link: _link(link, known), part) for part in parts[::2]]
    return "".join(parts)


def _link(link: re.Match, known: set[str]) -> str:
    """Return a link to a page of the site unchanged, any other as its text and the path of the file."""
    text, target = link[1], link[2].removeprefix("../")
    if target in known:
        return link[0]
    return f"`{target}`" if text.strip("`") == target else f"{text} (`{target}`)"
