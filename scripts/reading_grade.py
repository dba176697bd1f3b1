"""The reading grade of the documentation, by textstat: `python scripts/reading_grade.py [--of DIR]`.

The Flesch-Kincaid grade is 0.39 words a sentence + 11.8 syllables a word - 15.59: about the American
school year that reads a text with ease.

Prose is what README.md, CHANGELOG.md and docs/*.md have in paragraphs and list items. Left out:
  - code blocks, tables, comments and HTML, which are no sentences;
  - headings, which have no verb;
  - where a link or a picture leads to; the words of the link stay, the picture's go.
Inline code counts as one short word, "code": it stands where a noun stands, so a sentence must not
lose it, but its letters (`jax.checkpoint(f, policy=...)`) are no syllables that anybody reads.
A paragraph, and an item of a list, ends its last sentence, whatever its last letter is: otherwise a
list without full stops would be one sentence.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pages(checkout: Path) -> list[Path]:
    """The pages whose words tests/test_docs.py counts."""
    return [
        checkout / "README.md",
        checkout / "CHANGELOG.md",
        *sorted((checkout / "docs").glob("*.md")),
    ]


def paragraphs(markdown: str) -> Iterator[str]:
    """The paragraphs and list items of a page, as plain words."""
    text = re.sub(r"^---\n.*?^---\n", "", markdown, count=1, flags=re.M | re.S)  # front matter
    text = re.sub(r"^ *(```|~~~).*?^ *\1 *$", "\n", text, flags=re.M | re.S)  # code blocks
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"^ *(?:\||:::|#).*$", "\n", text, flags=re.M)  # tables, references, headings
    text = re.sub(r"^ *(?:[-*+]|\d+\.|:) +", "\n\n", text, flags=re.M)  # items begin a paragraph
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)  # pictures
    text = re.sub(r"(`+)(?:.|\n)+?\1", "code", text)
    text = re.sub(r"\[([^]]*)\](?:\([^)]*\)|\[[^]]*\])", r"\1", text)  # links
    text = re.sub(r"<[^>]+>|https?://\S+", "", text)  # HTML, bare addresses
    text = re.sub(r"(?<=\w)\.(?=\w)", "", text)  # 2.1 is one word, and ends no sentence
    text = re.sub(r"\*\*|__|(?<!\w)[*_]|[*_](?!\w)", "", text)  # emphasis
    for part in re.split(r"\n\s*\n", text):
        words = " ".join(part.split())
        if re.search(r"[A-Za-z]{2}", words):
            yield words if words[-1] in ".!?" else f"{words.rstrip(':;,')}."


def prose(checkout: Path) -> str:
    """All paragraphs of all pages of `checkout`, one a line."""
    return "\n".join(p for page in pages(checkout) for p in paragraphs(page.read_text("utf-8")))


def grade(text: str) -> float:
    """The Flesch-Kincaid grade of `text`.

    Raises:
      ImportError: textstat is missing.
    """
    import textstat

    return float(textstat.flesch_kincaid_grade(text))


def sentences(text: str) -> list[str]:
    """The sentences of `text`, the longest first."""
    found = (s for p in text.splitlines() for s in re.split(r"(?<=[.!?])\s+", p))
    return sorted(found, key=lambda sentence: -len(sentence.split()))


def main() -> int:
    parser = argparse.ArgumentParser(description="The reading grade of the documentation.")
    parser.add_argument("--of", type=Path, default=ROOT, help="the checkout that is read")
    parser.add_argument(
        "--longest", type=int, default=0, help="show so many of the longest sentences"
    )
    arguments = parser.parse_args()
    text = prose(arguments.of)
    words = sum(len(page.read_text("utf-8").split()) for page in pages(arguments.of))
    print(f"{words} words, {len(text.split())} of them prose: grade {grade(text):.1f}")
    for sentence in sentences(text)[: arguments.longest]:
        print(f"  {len(sentence.split())} words: {sentence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
