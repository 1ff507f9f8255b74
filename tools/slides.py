"""Slides for teachers: a page for each part, made of its article's first figure, rule and prediction.

    python tools/build_site.py       # writes slides.html beside the site's other pages

The pages are for a screen and for paper: each is one landscape sheet when printed.
"""

import re
from html import escape
from pathlib import Path

from parts.manifest import Part

ROOT = Path(__file__).resolve().parent.parent
FIGURE = re.compile(r"^!\[([^\]]*)\]\(figures/(\S+\.svg)\)$", re.MULTILINE)
RULE = re.compile(r"^> \*\*(.+?)\*\*", re.MULTILINE | re.DOTALL)
PREDICT = re.compile(r"^\*\*Predict before you look\.\*\* (.+?)\n\n", re.MULTILINE | re.DOTALL)
ELSEWHERE = re.compile(r"\b(above|below|the (table|picture|figure|drawing|second line))\b")  # not on a sheet
LONGEST = 400  # characters of a question
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>ruvon: slides</title>
<link rel="icon" href="_static/favicon.svg">
<style>
@page { size: 297mm 167mm; margin: 0; }
* { box-sizing: border-box; margin: 0; }
body { background: #fff; color: #16202c; font: 18px/1.4 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
section { border-bottom: 1px solid #d5dbe3; display: flex; flex-direction: column; gap: 12px;
  justify-content: space-between; min-height: 100vh; padding: 4vh 5vw; }
h1 { font-size: 44px; }
h2 { font-size: 28px; }
h2 span { color: #1d4ed8; margin-right: 0.5em; }
img { align-self: center; flex: 1 1 0; max-width: 100%; min-height: 180px; object-fit: contain; width: 100%; }
blockquote { border-left: 4px solid #1d4ed8; font-weight: 650; padding-left: 14px; }
.predict { background: #f1f4f9; border-radius: 8px; padding: 10px 14px; }
a { color: #1d4ed8; }
code { background: #eef1f5; border-radius: 3px; font-size: 0.9em; padding: 0 3px; }
@media print {
  body { font-size: 13pt; }
  img { min-height: 0; }
  section { border: 0; break-after: page; height: 167mm; min-height: 0; overflow: hidden; }
  section:last-child { break-after: auto; }
  .web { display: none; }
}
</style>
</head>
<body>
<main>
"""


def slides(parts: list[Part]) -> str:
    """The page: a cover, and a sheet for each of `parts`."""
    cover = (
        "<section><h1>How does an LLM inference engine really work?</h1>\n"
        "<p>A sheet for each part: what you can do after it, its first figure, its rule, and a question to "
        "answer before the article is opened.</p>\n"
        '<p class="web">Print it, or let each part fill the screen. <a href="articles/course.html">The '
        "course</a> has plans, exam questions and projects.</p></section>\n"
    )
    return HEAD + cover + "".join(map(sheet, parts)) + "</main>\n</body>\n</html>\n"


def sheet(part: Part) -> str:
    """One part's section. What its article lacks (a figure, a rule, a prediction) is left out."""
    article = (ROOT / f"articles/{part.name}.md").read_text(encoding="utf-8")
    pieces = [
        f"<h2><span>{part.number.label}</span>{escape(part.title)}</h2>",
        f"<p>{prose(part.capability)}</p>",
    ]
    if figure := FIGURE.search(article):
        pieces.append(f'<img src="_images/{figure[2]}" alt="{escape(figure[1])}">')
    if rule := RULE.search(article):
        pieces.append(f"<blockquote>{prose(rule[1])}</blockquote>")
    if question := best(PREDICT.findall(article)):
        pieces.append(f'<p class="predict"><b>Predict:</b> {prose(question)}</p>')
    pieces.append(
        f'<p class="web"><a href="articles/{part.name}.html">The article of {part.number.label}</a></p>'
    )
    return "<section>\n" + "\n".join(pieces) + "\n</section>\n"


def best(questions: list[str]) -> str:
    """The one that a reader can answer from the sheet alone: the longest, since it says most of what it is
    about, that points at nothing elsewhere and is not too long; empty: there is none.
    """
    alone = [found for found in questions if not ELSEWHERE.search(found) and len(prose(found)) <= LONGEST]
    return max(alone, key=lambda found: len(prose(found)), default="")


def prose(text: str) -> str:
    """Markdown of a paragraph as HTML, with links as their words and without marks."""
    text = escape(LINK.sub(r"\1", re.sub(r"<!--.*?-->", "", text)).replace("\n> ", "\n"), quote=False)
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{part[1:-1]}</code>" if part.startswith("`") else emphasised(part) for part in parts
    )


def emphasised(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", text, flags=re.DOTALL)
    return re.sub(r"(?<!\*)\*([^*\n]+?)\*", r"<em>\1</em>", text)
