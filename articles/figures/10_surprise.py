"""A story coloured by surprise, as storyteller reads it.

python articles/figures/10_surprise.py      # writes 10_surprise.svg beside this file, from the embedded model
"""

from pathlib import Path

from benchmarks.part10_surprise import STORY, make_engine, scored, svg


def main() -> None:
    target = Path(__file__).with_suffix(".svg")
    target.write_text(svg(scored(make_engine(), STORY)), encoding="utf-8")
    print(target.name)


if __name__ == "__main__":
    main()
