"""What the step player shows of drafts: the twelve requests of Part 8, without and with three drafts a step.

articles/figures/16_play.py writes the recording; no time is measured. The clock is the step number. The
models are storyteller and storyteller-draft, since what stands depends on what is said.
"""

from itertools import accumulate, pairwise

from benchmarks.part08_play import GUESTS, SEATS, Run, play, steps_recording
from benchmarks.part16_engines import PROMPTS, Fixed, load, plain, with_draft_model
from engine.text.tokenizer import Tokenizer

DRAFTS = 3


def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Each guest's prompt: a piece of a long text, of the guest's length."""
    text = tokenizer.encode(" ".join(PROMPTS))
    places = pairwise((0, *accumulate(guest.prompt for guest in GUESTS)))
    return {guest.name: text[start:end] for guest, (start, end) in zip(GUESTS, places, strict=True)}


def recording() -> dict:
    models = load(rows=SEATS)
    texts = prompts(models.tokenizer)
    runs = [
        Run("plain", "no drafts", play(plain(models, SEATS), texts), SEATS),
        Run("drafts", f"{DRAFTS} drafts", play(with_draft_model(models, Fixed(DRAFTS), SEATS), texts), SEATS),
    ]
    return steps_recording("Twelve requests, step by step, without and with drafts", "In each step", runs)
