"""The chat in a terminal while others use the server, too: a recording that plays once and ends as a picture.

python articles/figures/14_terminal.py --record    # writes 14_terminal.txt: lines of JSON, seconds and text
python articles/figures/14_terminal.py             # writes 14_terminal.svg, from 14_terminal.txt
"""

import argparse
import asyncio
import importlib.util
import json
import sys
import threading
from html import escape
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from drawing import Row, play  # noqa: E402

from tests.part14.terminal import Screen, Terminal  # noqa: E402

RECORDING = Path(__file__).with_suffix(".txt")
COLUMNS = 78
CROWD = ((12, 6),)  # seconds, people
FRAME = 0.08  # seconds: what comes closer together is shown together


def record() -> None:
    import torch

    from benchmarks.part11_crowd import come
    from parts.stage import served

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("demo", ROOT / "parts/14_streaming_client/demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = module.build()[-1]
    with served(app) as address, Terminal(address, COLUMNS) as terminal:
        crowd = threading.Thread(target=asyncio.run, args=[come(address, module.MODEL, CROWD)])
        crowd.start()
        terminal.shows("> ")
        say(terminal, "Tell me a story about a dog and a red ball")
        terminal.shows("\n> ", times=2)
        say(terminal, "Tell me a story about a cat and a boat")
        terminal.shows("\n", times=len(terminal.screen.lines) + 2)
        terminal.type("\x03")
        terminal.shows("\n> ", times=3)
        say(terminal, "/stats")
        terminal.shows("median")
        terminal.shows("\n> ", times=4)
        came = terminal.came
        crowd.join()
    lines = [json.dumps([round(at - came[0][0], 3), text], ensure_ascii=False) for at, text in came]
    RECORDING.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RECORDING.name, len(came), "pieces")


def say(terminal: Terminal, words: str) -> None:
    for key in words:
        terminal.type(key)
        terminal.read(0.045)
    terminal.type("\r")


def versions() -> list[Row]:
    """Each row as it was."""
    screen, shown, done = Screen(), {}, []
    events = [json.loads(line) for line in RECORDING.read_text(encoding="utf-8").splitlines()]
    for frame, group in groupby(events, key=lambda event: int(event[0] / FRAME)):
        screen.feed("".join(text for _, text in group))
        for number, row in enumerate(screen.rows):
            cells, since = shown.get(number, ([], 0.0))
            if cells != row:
                done += [(number, *markup(cells), since, frame * FRAME)] if cells else []
                shown[number] = (list(row), frame * FRAME)
    done += [(number, *markup(cells), since, None) for number, (cells, since) in shown.items() if cells]
    return done


def markup(cells: list) -> tuple[str, str]:
    """(its SVG, its class)"""
    own = "".join(one for one, _ in cells[:2]) == "> "
    runs = []
    for dim, run in groupby(cells, key=lambda cell: cell[1]):
        words = escape("".join(one for one, _ in run))
        runs.append(f'<tspan class="dim">{words}</tspan>' if dim else words)
    return "".join(runs), "own" * own


def draw() -> None:
    label = "A chat in a terminal: words stream, one answer is stopped, then /stats"
    play(__file__, versions(), COLUMNS, label)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="make the recording anew")
    record() if parser.parse_args().record else draw()
