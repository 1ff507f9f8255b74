"""The same twelve requests without and with drafts: what the step player plays, and a picture of it.

python articles/figures/16_play.py    # writes 16_play.play.json and 16_play.svg beside this file
"""

from drawing import draw_steps, write_recording

from benchmarks.part16_play import recording


def main() -> None:
    recorded = recording()
    write_recording(__file__, recorded)
    draw_steps(__file__, recorded, "The same twelve requests, without and with three drafts a step")


if __name__ == "__main__":
    main()
