"""Draws the rooms of engine/ from their imports: articles/figures/rooms.svg, which CONTRIBUTING.md shows.

    python tools/draw_rooms.py           # write it
    python tools/draw_rooms.py --check   # exit 1 if what is committed is out of date (part of `make test`)

The order is ROOMS of tests/series/checks.py, the contracts are the docstrings of the rooms' `__init__.py`.
"""

import sys
import textwrap
from collections.abc import Collection
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from parts.tree import source_files  # noqa: E402
from tests.series.checks import ROOMS, contract, room_imports  # noqa: E402

PICTURE = ROOT / "articles" / "figures" / "rooms.svg"
WIDTH, EDGE, HEAD = 900, 12, 50  # pixels, as all here
BOX, NAME, CELL = 440, 114, 17  # the widths of a box, of the name in it, and of a column
LINE, MARGIN = 14, 8  # the height of a line; between rows, and above and below what is in one
WORDS = 48  # characters of a contract on a line
STYLE = """
text { font: 12px system-ui, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; fill: #222222; }
.name { font-weight: bold; font-size: 13px; } .grey { fill: #555555; }
.box { fill: #dbeafe; stroke: #222222; stroke-width: 0.9; }
.line { stroke: #cbd5e1; } .foot { fill: #1d4ed8; } .dot { fill: #222222; } .upwards { fill: #dc2626; }
"""


def draw(contracts: dict[str, str], imports: Collection[tuple[str, str]]) -> str:
    """The picture as SVG. `contracts`: room -> contract, from bottom to top; `imports`: (room, imported).

    A box per room. A dot in its row says that it imports the room at the foot of the dot's column; a red one,
    that it imports a room above.
    """
    names = list(contracts)
    words = {name: textwrap.wrap(contracts[name].replace("`", ""), WORDS) for name in names}
    tall = {name: LINE * max(len(words[name]), 2) + MARGIN for name in names}
    height = HEAD + sum(tall.values()) + EDGE
    column = {name: EDGE + BOX + CELL * (at + 1) for at, name in enumerate(names)}  # its middle
    row = {
        name: HEAD + sum(tall[n] for n in names[at + 1 :]) + tall[name] / 2 for at, name in enumerate(names)
    }
    lines, boxes, dots = [], [], []
    for name in names:
        x, y = column[name], row[name]
        top = min([row[room] for room, below in imports if below == name], default=y)
        lines.append(f'<path class="line" d="M{EDGE + BOX} {y:g}H{x:g}V{min(top, y):g}" fill="none"/>')
        boxes.append(_box(name, words[name], y, tall[name] - MARGIN // 2))
        boxes.append(f'<rect class="foot" x="{x - 5}" y="{y - 5:g}" width="10" height="10"/>')
        boxes.append(_text(x + 11, y, name))
    for room, below in sorted(imports):
        kind = "dot" if names.index(below) < names.index(room) else "upwards"
        dots.append(f'<circle class="{kind}" cx="{column[below]}" cy="{row[room]:g}" r="4"/>')
    explained = (
        "The rooms of engine/, from bottom to top: a room imports only rooms below it.",
        "A dot in a room's row: it imports the room whose blue square stands at the foot of that column.",
    )
    head = [_text(EDGE, 18 + 16 * at, line, "grey") for at, line in enumerate(explained)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'role="img" aria-label="{" ".join(explained)}"><style>{STYLE}</style>',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
            *[*head, *lines, *boxes, *dots],
            "</svg>\n",
        ]
    )


def _box(name: str, words: list[str], y: float, height: float) -> str:
    """A room's box, with its middle at `y`: its name, and the lines of its contract."""
    first = y - LINE / 2 * (len(words) - 1)
    return "\n".join(
        [
            f'<rect class="box" x="{EDGE}" y="{y - height / 2:g}" width="{BOX}" height="{height:g}" rx="5"/>',
            _text(EDGE + 10, y, name, "name"),
            *[_text(EDGE + NAME, first + LINE * at, line) for at, line in enumerate(words)],
        ]
    )


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    """Text that begins at `x`, its middle at the height `y`."""
    return f'<text x="{x:g}" y="{y + 4:g}" class="{kind}">{escape(words)}</text>'


def main() -> int:
    files = source_files(ROOT)
    standing = [room for room in ROOMS if f"engine/{room}/__init__.py" in files]
    # A room that is in no order is not drawn; tests/series/test_checks.py names it.
    imports = [pair for pair in room_imports(ROOT, files) if set(pair) <= set(standing)]
    picture = draw({room: contract(ROOT, room) for room in standing}, imports)
    where = PICTURE.relative_to(ROOT)
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == picture:
        return 0
    if "--check" in sys.argv:
        print(f"{where}: out of date; `python tools/draw_rooms.py` draws it anew")
        return 1
    PICTURE.write_text(picture, encoding="utf-8")
    print(f"{where}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
