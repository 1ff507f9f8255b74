"""Shapes of well-known models, to run with random weights in their full size and without a download. Part 20.

    LLM("qwen3-0.6b", load_format="dummy")

A shape is a config.json under engine/models/shapes. It has no weights, so it is no embedded model, and
without `load_format="dummy"` its name means what it always does: a folder, or an id on the hub. Promises the
model's arithmetic and memory; what it says is noise, in the words of the embedded tokenizer, and nothing at
all for the many ids that this one lacks. `EngineArgs` asks here.
"""

from pathlib import Path

SHAPES = Path(__file__).parent / "shapes"
TOKENIZER = "storyteller"  # where none is given


def known_shapes() -> list[str]:
    """Their names, found by scanning `engine/models/shapes`."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def shape_folder(name: str | Path) -> Path | None:
    """The folder of a shape, by the model's name as the hub has it, with or without its owner, in any case of
    letters: "Qwen/Qwen3-0.6B". None: there is no such shape, or a folder of the user's has this name.
    """
    short = str(name).rpartition("/")[2].lower()
    return None if Path(name).is_dir() or short not in known_shapes() else SHAPES / short
