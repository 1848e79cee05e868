"""Reads the project's Markdown files: their code blocks, links, headings and the names in backticks."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DOCUMENTS", "PAGES", "ROOT", "Block", "anchors", "blocks", "code_spans", "links", "prose", "undo"]

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PAGES = [*DOCUMENTS, *sorted(ROOT.glob("examples/*.md"))]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r'<img\b[^>]*\bsrc="([^"]+)"')
_SPAN = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        document: the file.
        line: number of its first line of code, from 1.
        language: what stands behind the opening fence.
        source: the code.
    """

    document: Path
    line: int
    language: str
    source: str

    @property
    def padded(self) -> str:
        """The code behind so many empty lines that its line numbers are those of the document."""
        return "\n" * (self.line - 1) + self.source


def blocks(document: Path, *languages: str) -> list[Block]:
    """The blocks of a document, in their order."""
    text = document.read_text()
    found = (Block(document, text.count("\n", 0, m.start(2)) + 1, m[1], m[2]) for m in _FENCE.finditer(text))
    return [block for block in found if block.language in languages]


def prose(document: Path) -> str:
    """The text outside of code blocks."""
    return _FENCE.sub("", document.read_text())


def links(document: Path) -> list[str]:
    """Targets of links and images."""
    text = prose(document)
    return [match[1] for pattern in (_LINK, _IMAGE) for match in pattern.finditer(text)]


def code_spans(document: Path) -> Iterator[str]:
    """What stands in backticks."""
    return (match[1] for match in _SPAN.finditer(prose(document)))


def anchors(document: Path) -> set[str]:
    """The fragments by which the headings can be linked, made as GitHub makes them."""
    headings = (heading.replace("`", "").lower() for heading in _HEADING.findall(prose(document)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def undo(diff: str, text: str) -> str:
    """``text`` as it was before ``diff``.

    Raises:
        ValueError: what the diff leaves does not occur in ``text`` exactly once.
    """
    for hunk in filter(None, re.split(r"\n\n+", diff.strip("\n"))):
        lines = hunk.splitlines()
        after = "\n".join(line[1:] for line in lines if line[0] in " +")
        before = "\n".join(line[1:] for line in lines if line[0] in " -")
        if text.count(after) != 1:
            raise ValueError(f"occurs {text.count(after)} times:\n{after}")
        text = text.replace(after, before)
    return text
