"""The same twelve requests under four schedulers: what the step player plays, and a picture of it.

python articles/figures/08_play.py    # writes 08_play.play.json and 08_play.svg beside this file
"""

from drawing import draw_steps, write_recording

from benchmarks.part08_play import recording


def main() -> None:
    recorded = recording()
    write_recording(__file__, recorded)
    draw_steps(__file__, recorded, "The same twelve requests, and how full each step was")


if __name__ == "__main__":
    main()
