"""A hundred people and a queue with room for 32: a recording that plays once and ends as a picture.

python articles/figures/15_crowd.py --record    # writes 15_crowd.txt: lines of JSON, seconds and rows
python articles/figures/15_crowd.py             # writes 15_crowd.svg, from 15_crowd.txt
"""

import argparse
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from drawing import Row, play

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

RECORDING = Path(__file__).with_suffix(".txt")
COLUMNS = 78
FRAME = 0.5  # seconds between two looks
STYLE = """
.yellow { fill: #f2c14e; } .cyan { fill: #5ad1d1; } .blue { fill: #8ab4ff; } .green { fill: #7ddf8a; }
"""


def record() -> None:
    import torch
    from rich.console import Console

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("demo", ROOT / "parts/15_stress_test/demo.py")
    demo = sys.modules["demo"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    engine, _ = demo.build()
    texts, board, frames = demo.alone(engine), demo.board, []

    def noted(crowd, backend, engine, since):
        shown = board(crowd, backend, engine, since)
        seconds = demo.time.perf_counter() - since
        if not frames or seconds - frames[-1][0] >= FRAME or crowd.done.is_set():
            frames.append((round(seconds, 2), list(rows(shown.renderables))))
        return shown

    demo.board = noted
    crowd, _ = demo.scene(Console(file=io.StringIO(), width=COLUMNS), engine, demo.ROOM)
    assert demo.everybodys_own(crowd, texts), "somebody has another text"
    lines = [json.dumps(frame, ensure_ascii=False) for frame in frames]
    RECORDING.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(RECORDING.name, len(frames), "frames")


def rows(texts) -> Iterator[list[tuple[str, str]]]:
    """Of rich's texts, each line as runs of (words, style)."""
    for text in texts:
        for line in text.split("\n"):
            style = [str(text.style)] * len(line)
            for span in line.spans:
                style[span.start : span.end] = [str(span.style)] * (span.end - span.start)
            runs: list[list[str]] = []
            for one, kind in zip(line.plain, style, strict=True):
                if runs and kind == runs[-1][1]:
                    runs[-1][0] += one
                else:
                    runs.append([one, kind])
            if runs:
                yield [tuple(run) for run in runs]


def versions() -> Iterator[Row]:
    """Each row as it was."""
    shown: dict[int, tuple[str, float]] = {}
    for line in RECORDING.read_text(encoding="utf-8").splitlines():
        seconds, there = json.loads(line)
        for number, runs in enumerate(there):
            now = "".join(f'<tspan class="{kind}">{escape(words)}</tspan>' for words, kind in runs)
            before, since = shown.get(number, ("", 0.0))
            if now != before:
                if before:
                    yield number, before, "", since, seconds
                shown[number] = now, seconds
    for number, (last, since) in shown.items():
        yield number, last, "", since, None


def draw() -> None:
    label = "A hundred marks, one for each person: who waits, who is told to come again, who reads"
    play(__file__, versions(), COLUMNS, label, STYLE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="make the recording anew")
    record() if parser.parse_args().record else draw()
