"""The step player's twelve requests in the memory of two slots, as slots and as pages.

python articles/figures/12_pages.py    # writes 12_pages.play.json and 12_pages.svg beside this file
"""

from drawing import draw_steps, write_recording

from benchmarks.part12_play import steps_in_slots_and_pages


def main() -> None:
    recorded = steps_in_slots_and_pages()
    write_recording(__file__, recorded)
    draw_steps(__file__, recorded, "The same memory, as two slots and as pages")


if __name__ == "__main__":
    main()
