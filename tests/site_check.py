"""Find what a built site links to and has not: ``python tests/site_check.py DIRECTORY``."""

from __future__ import annotations

import html.parser
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Links(html.parser.HTMLParser):
    """What a page links to, and the places that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del tag
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def dead_links(site: Path) -> list[str]:
    """Return each page and what it links to that is missing, within the site alone."""
    pages = {path: _Links(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (parts.fragment and known and unquote(parts.fragment) not in known.anchors):
                found.append(f"{path.relative_to(site)}: {link}")
    return found


def main() -> int:
    """Print the dead links; the exit code is 1 if there are any."""
    site = Path(sys.argv[1]).resolve()
    found = dead_links(site)
    sys.stdout.write("\n".join(found or ["no dead links"]) + "\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
