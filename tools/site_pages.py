"""Pages of the site that no file of the repository is: its first one, and the one for what is not there.

Texts are README's; what is said of the parts is the manifests'.
"""

import re
from html import escape
from pathlib import Path

from parts.manifest import Part
from tools.slides import prose

ROOT = Path(__file__).resolve().parent.parent
NOT_FOUND = """\
---
orphan: true
---
# This page is not here

<p>Perhaps it has moved: the <a href="search.html">search</a> finds it,
or the <a href="index.html">front page</a> leads to it.</p>
"""

COLAB = """

<details><summary>Run it in a browser</summary>

[Open it in Google Colab](https://colab.research.google.com/github/{repository}/blob/main/{notebook}), which
wants an account with Google. There, put this into a new first cell, and run it before the others; it takes
minutes.

```python
import os, subprocess, sys

home = "/content/ruvon"
if not os.path.exists(home):
    subprocess.run(["git", "clone", "--depth", "1", "https://github.com/{repository}", home], check=True)
wanted = ["-e", home + "[server,transformers,gpu]", "peft", "matplotlib"]
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)
os.chdir(home + "/notebooks")
sys.path.insert(0, home)
```

</details>
"""


def section(text: str, heading: str) -> str:
    """What stands below a heading of README, up to the next one. Raises ValueError without the heading."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    if not found:
        raise ValueError(f"README.md has no heading {heading!r}")
    return found[1].strip()


def landing(readme: str, parts: list[Part]) -> str:
    """The first page: a sentence, the chat, paths, and a card for each part."""
    head = section(readme, "ruvon")
    sentence = head.partition("\n")[0]
    clone = re.search(r"```\n(git clone .*)\n```", head)
    assert clone, "README begins with how to get it"
    chat = re.search(r"!\[[^\]]*\]\(articles/figures/14_terminal\.svg\)", head)
    assert chat, "README begins with the recorded chat"
    paths = section(readme, "Choose your path")
    for anchor, target in {"#the-road": "#the-parts", "#use-it": "articles/use.md"}.items():
        paths = paths.replace(f"]({anchor})", f"]({target})")
    first, letters = (
        [part for part in parts if part.number.is_letter is is_letter] for is_letter in (False, True)
    )
    return f"""\
# ruvon

{sentence}

<p class="ways"><a href="articles/{first[0].name}.html">Begin with Part 1</a>
<a href="articles/use.html">Use it</a>
<a href="articles/course.html">Teach with it</a>
<a href="slides.html">Slides</a></p>

{chat[0]}

```bash
{clone[1]}
```

## Choose your path

{paths}

## The parts

{_cards(first)}

## After them

{_cards(letters)}
"""


def in_colab(notebook: str, repository: str) -> str:
    """Below a notebook's first words: where it opens in Google's Colab, and the cell that has to run there
    first. `notebook` is its path, `repository` GitHub's owner/name.
    """
    return COLAB.format(notebook=notebook, repository=repository)


def _cards(parts: list[Part]) -> str:
    return f'<div class="cards">\n{"".join(map(_card, parts))}</div>'


def _card(part: Part) -> str:
    stars = " ".join("★" * exercise.grade for exercise in part.exercises if exercise.grade)
    return (
        f'<a class="card" href="articles/{part.name}.html"><span class="number">{part.number}</span>'
        f"<strong>{escape(part.title)}</strong><span>{prose(part.capability)}</span>"
        f'<span class="time">{part.minutes} minutes · {stars}</span></a>\n'
    )
