"""What the site changes in a Markdown file: menus from the index, links to files that are no pages.

The files stay readable on a forge, so they have no directives of the generator.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INDEX = "docs/README"

_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```[^\n]*$)", re.DOTALL | re.MULTILINE)


def pages_of(folder: Path) -> list[Path]:
    """Its README, or else all of its pages."""
    readme = folder / "README.md"
    return [readme] if readme.exists() else sorted(folder.rglob("*.md"))


def menu(text: str) -> str:
    """The toctrees of the index: for each section, the pages that its table names."""
    parts, known = [], {ROOT / f"{INDEX}.md"}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
        targets = [(ROOT / "docs" / target).resolve() for _, target, _ in _LINK.findall(rows)]
        pages = [
            page
            for target in targets
            for page in (pages_of(target) if target.is_dir() else [target])
            if page.suffix == ".md" and page not in known
        ]
        known |= {*pages}
        if pages:
            names = "\n".join(f"/{page.relative_to(ROOT).with_suffix('')}" for page in pages)
            caption = section.splitlines()[0]
            parts.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "\n".join(parts)


def with_links(page: Path, text: str, source_url: str = "") -> str:
    """The text with links to folders and to files that are no pages replaced.

    Links to other files lead to `source_url`; if that is empty, only their text stays.
    """

    def replaced(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if ":" in target:
            return match[0]
        path = (page.parent / target).resolve()
        readme = path / "README.md"
        if readme.exists():
            return f"[{label}]({target.rstrip('/')}/README.md{anchor})"
        if path.suffix == ".md" or not path.exists():  # Sphinx reports what does not exist
            return match[0]
        return f"[{label}]({source_url}/{path.relative_to(ROOT)})" if source_url else label

    pieces = _CODE.split(text)
    pieces[::2] = [_LINK.sub(replaced, piece) for piece in pieces[::2]]
    return "".join(pieces)
