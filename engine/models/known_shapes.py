"""Shapes of well-known models, which run in full size with random weights and without a download. Part 20.

    LLM("qwen3-0.6b", load_format="dummy")

A shape is a config.json under engine/models/shapes, without weights. Promises the arithmetic and the memory
of the real model. The output tokens are noise. The embedded tokenizer gives their texts; an id past its
vocabulary has an empty text. Only `load_format="dummy"` looks for a shape: without it, a name is a folder or
a hub id as usual. `EngineArgs` calls this module.
"""

from pathlib import Path

SHAPES = Path(__file__).parent / "shapes"
TOKENIZER = "storyteller"  # the embedded tokenizer, for a shape without `tokenizer=`


def known_shapes() -> list[str]:
    """The names of the shapes, sorted: the folders of `engine/models/shapes`."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def shape_folder(name: str | Path) -> Path | None:
    """The folder of the shape `name`, or None if there is no such shape.

    `name` is the model's name on the hub, with or without its owner, in any case: "Qwen/Qwen3-0.6B" or
    "qwen3-0.6b". A folder of the user with this name takes precedence: then the result is None, too.
    """
    shape = str(name).rpartition("/")[2].lower()
    if Path(name).is_dir() or shape not in known_shapes():
        return None
    return SHAPES / shape
