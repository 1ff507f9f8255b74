"""What tokenizer files say, as the arguments of `Tokenizer`. Part 1.

Promises to refuse by name every setting that would change ids and is not computed here, and to name the file
that is missing or damaged. Reads Hugging Face's tokenizer.json, or GPT-2's original vocab.json and
merges.txt.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import regex

from engine.checkpoint import CheckpointError, read_json, read_text

# Words, numbers, punctuation, each with the space before it; runs of space, less the one the next word takes.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@dataclass(frozen=True)
class AddedToken:
    """A token matched in the text as a whole, before any splitting, such as `<|endoftext|>`."""

    id: int
    content: str
    special: bool = True
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False

    def pattern(self) -> str:
        body = regex.escape(self.content)
        body = rf"(?<!\w){body}(?!\w)" if self.single_word else body
        return (r"\s*" if self.lstrip else "") + body + (r"\s*" if self.rstrip else "")


def read_tokenizer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file a tokenizer comes from, and the arguments of `Tokenizer`.

    Raises CheckpointError naming the file and what is wrong with it, or what in it is not supported.
    """
    config = folder / "tokenizer_config.json"
    eos = read_json(config).get("eos_token") if config.exists() else "<|endoftext|>"
    path = folder / "tokenizer.json"
    if path.exists():
        raw, parse = read_json(path), _from_tokenizer_json
    else:
        path = folder / "vocab.json"
        raw = {"vocab": read_json(path), "merges": _read_lines(folder / "merges.txt")}
        parse = _from_vocab_and_merges
    try:
        return path, parse(raw) | {"eos_token": eos["content"] if isinstance(eos, dict) else eos}
    except KeyError as error:
        raise CheckpointError(f"{path}: has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_lines(path: Path) -> list[str]:
    lines = read_text(path).split("\n")
    return [line for line in lines if line and not line.startswith("#version")]


def _from_vocab_and_merges(raw: dict) -> dict[str, Any]:
    vocab = raw["vocab"]
    special = [AddedToken(vocab[token], token) for token in ("<|endoftext|>",) if token in vocab]
    return {"vocab": vocab, "merges": merge_pairs(raw["merges"]), "added_tokens": special}


def merge_pairs(merges: list) -> list[tuple[str, str]]:
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    for rank, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"merge {rank}, {merges[rank]!r}, is not a pair")
    return pairs


def _from_tokenizer_json(raw: dict) -> dict[str, Any]:
    """The parts of a `tokenizers` file a byte-level BPE has; anything else is refused by name."""
    model = raw["model"]
    other = "sentencepiece"  # the kind of BPE that begins with characters, which Part 20 reads
    later = model.get("byte_fallback") and find_spec(f"engine.tokenizer_{other}")
    if model.get("type") != "BPE" or (model.get("byte_fallback") and not later):
        kind = "byte_fallback" if model.get("byte_fallback") else model.get("type")
        raise ValueError(f"model is {kind}, only byte-level BPE is supported")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            raise ValueError(f"model.{setting}={model[setting]!r} is not supported")
    if later:
        return import_module(later.name).from_tokenizer_json(raw)
    return {
        "vocab": model["vocab"],
        "merges": merge_pairs(model["merges"]),
        "added_tokens": added_tokens(raw),
        "ignore_merges": model.get("ignore_merges", False),
        "normal_form": _normal_form(raw.get("normalizer")),
        "affixes": affixes(raw.get("post_processor")),
        **_splitting(raw.get("pre_tokenizer")),
    }


def added_tokens(raw: dict) -> list[AddedToken]:
    fields = AddedToken.__dataclass_fields__
    return [
        AddedToken(**{k: v for k, v in token.items() if k in fields}) for token in raw.get("added_tokens", [])
    ]


def steps_of(node: dict | None, inner: str) -> list[dict]:
    """`tokenizers` nests steps in a Sequence; a lone step, or none, becomes a list as well."""
    return [] if node is None else node[inner] if node["type"] == "Sequence" else [node]


def _normal_form(node: dict | None) -> str | None:
    forms = [step["type"] for step in steps_of(node, "normalizers")]
    if len(forms) > 1 or not set(forms) <= set(NORMAL_FORMS):
        raise ValueError(
            f"normalizer {' + '.join(forms)} is not supported, only one of {', '.join(NORMAL_FORMS)}"
        )
    return forms[0] if forms else None


def _splitting(node: dict | None) -> dict[str, Any]:
    """ByteLevel alone (GPT-2), or Split by a regex and then ByteLevel (Llama 3, Qwen)."""
    steps = steps_of(node, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return {"pattern": GPT2_PATTERN, "add_prefix_space": steps[0].get("add_prefix_space", False)}
    if kinds == ["Split", "ByteLevel"]:
        wanted = {"behavior": "Isolated", "invert": False}, {"use_regex": False, "add_prefix_space": False}
        for step, settings in zip(steps, wanted, strict=True):
            for name, value in settings.items():
                if step.get(name) != value:
                    raise ValueError(
                        f"pre_tokenizer {step['type']}.{name}={step.get(name)!r} is not supported"
                    )
        pattern = steps[0]["pattern"].get("Regex") or regex.escape(steps[0]["pattern"]["String"])
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"pre_tokenizer Split.pattern {pattern!r} does not compile: {error}") from None
        return {"pattern": pattern}
    raise ValueError(f"pre_tokenizer {' + '.join(kinds) or 'none'} is not supported, only byte-level ones")


def affixes(node: dict | None) -> tuple[list[int], list[int]]:
    """Ids that the post-processor puts before and after one text."""
    before: list[int] = []
    after: list[int] = []
    for step in steps_of(node, "processors"):
        if step["type"] == "TemplateProcessing":
            side = before
            for item in step["single"]:
                if "Sequence" in item:
                    side = after
                else:
                    side.extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        elif step["type"] != "ByteLevel":
            raise ValueError(f"post_processor {step['type']} is not supported")
    return before, after
