"""Shapes of well-known models, to run with random weights in their full size and without a download. Part 20.

    LLM("qwen3-0.6b", load_format="dummy")

A shape is a config.json under engine/models/shapes, without weights. Without `load_format="dummy"` its name
is a folder or an id on the hub, as any other name. Promises the model's arithmetic and memory. Its tokens are
noise; the embedded tokenizer gives their texts, and an empty text for each id past its own vocabulary.
`EngineArgs` asks here.
"""

from pathlib import Path

SHAPES = Path(__file__).parent / "shapes"
TOKENIZER = "storyteller"  # the embedded one, for a shape without `tokenizer=`


def known_shapes() -> list[str]:
    """The shapes' names, found by scanning `engine/models/shapes`."""
    return sorted(path.parent.name for path in SHAPES.glob("*/config.json"))


def shape_folder(name: str | Path) -> Path | None:
    """The folder of a shape. `name`: the model's on the hub ("Qwen/Qwen3-0.6B"), with or without its owner,
    in upper or lower case. None: there is no such shape, or the user has a folder of this name.
    """
    shape = str(name).rpartition("/")[2].lower()
    if Path(name).is_dir() or shape not in known_shapes():
        return None
    return SHAPES / shape
