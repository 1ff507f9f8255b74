"""Reads tokenizer files, and returns the arguments of `Tokenizer`. Part 1.

Reads Hugging Face's tokenizer.json, or GPT-2's original vocab.json and merges.txt. Promises to refuse every
setting that would change ids and is not supported. An error names the setting, or the missing or damaged
file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import regex

from engine.models.checkpoint import CheckpointError, read_json, read_text

# Splits text into words, numbers and punctuation, each with one space before it, and into runs of spaces. A
# run leaves its last space to the word after it.
GPT2_PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NormalForm = Literal["NFC", "NFD", "NFKC", "NFKD"]
NORMAL_FORMS: tuple[NormalForm, ...] = get_args(NormalForm)
SENTENCEPIECE = f"{__package__}.sentencepiece"  # Part 20's module, which reads files with "byte_fallback"


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text as a whole, before the text is split into words: `<|endoftext|>`."""

    id: int
    content: str  # the token's text
    special: bool = True  # whether `skip_special_tokens` leaves the token out of the text
    single_word: bool = False  # whether the token is found only between characters that are no part of a word
    lstrip: bool = False  # whether the token includes all spaces before it
    rstrip: bool = False  # whether the token includes all spaces after it

    def pattern(self) -> str:
        """The regular expression that finds the token, with the spaces that the token includes."""
        body = regex.escape(self.content)
        body = rf"(?<!\w){body}(?!\w)" if self.single_word else body
        before = r"\s*" if self.lstrip else ""
        after = r"\s*" if self.rstrip else ""
        return before + body + after


class Affixes(NamedTuple):
    """The token ids that are put before and after each text, such as Llama 3's beginning of a text."""

    before: Sequence[int]
    after: Sequence[int]


NO_AFFIXES = Affixes((), ())


def read_tokenizer(folder: Path) -> tuple[Path, dict[str, Any]]:
    """(file, arguments): the file that describes the tokenizer of a model folder, and the arguments of
    `Tokenizer` that it holds. If "tokenizer_class" is among them, it is the class to make, a subclass of
    `Tokenizer`, and the others are that class's arguments.

    Raises CheckpointError, which names the file, if there is no such file, if the file is damaged, or if one
    of its settings is not supported.
    """
    eos_token = _eos_token(folder)
    path, merges_path = folder / "tokenizer.json", folder / "merges.txt"
    try:
        if path.exists():
            arguments = _from_tokenizer_json(read_json(path))
        else:
            path = folder / "vocab.json"
            if not path.exists() and not merges_path.exists():
                looked_for = "tokenizer.json, and for vocab.json and merges.txt"
                raise CheckpointError(f"{folder}: no tokenizer; looked for {looked_for}")
            arguments = _from_vocab_and_merges(read_json(path), _read_lines(merges_path))
        arguments["eos_token"] = eos_token
        _check_ids(arguments, _model_vocab_size(folder))
    except KeyError as error:
        raise CheckpointError(f"{path}: has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return path, arguments


def _eos_token(folder: Path) -> str | None:
    """The text of the token that ends a text, from tokenizer_config.json; None if it names none. Without this
    file, it is GPT-2's.

    Raises CheckpointError if the file is damaged, or if its `eos_token` is not a text.
    """
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return "<|endoftext|>"
    eos_token = read_json(path).get("eos_token")
    if isinstance(eos_token, dict) and "content" in eos_token:  # the other entries are settings of the token
        eos_token = eos_token["content"]
    if eos_token is not None and not isinstance(eos_token, str):
        raise CheckpointError(f"{path}: eos_token={eos_token!r:.80}: a text is accepted")
    return eos_token


def _model_vocab_size(folder: Path) -> int | None:
    """The vocab_size in the model's config.json, or None if there is no such file or no such number.

    An invalid vocab_size is no error here, because `ModelConfig` refuses it.
    """
    config = folder / "config.json"
    vocab_size = read_json(config).get("vocab_size") if config.exists() else None
    return vocab_size if type(vocab_size) is int else None


def _check_ids(arguments: dict[str, Any], vocab_size: int | None) -> None:
    """Raises ValueError, which names the token or the field, if an id is not a whole number of at least 0, or
    if the id of an affix is not below `vocab_size` (None: not known). `arguments` are those of `Tokenizer`.

    Every prompt has the affixes, so the model must have their ids. The ids of other tokens may be larger,
    because a tokenizer's vocabulary may be larger than the model's.
    """
    vocab = list(arguments["vocab"].items())
    added = [(token.content, token.id) for token in arguments["added_tokens"]]
    affixes: Affixes = arguments.get("affixes", NO_AFFIXES)
    affix_ids = [("post_processor", id) for id in (*affixes.before, *affixes.after)]
    for name, id in [*vocab, *added, *affix_ids]:
        if type(id) is not int or id < 0:
            raise ValueError(f"{name!r:.80} has id {id!r:.40}: a whole number from 0 on is accepted")
    for name, id in affix_ids:
        if vocab_size is not None and id >= vocab_size:
            raise ValueError(f"{name!r:.80} has id {id!r:.40}: config.json's vocab_size is {vocab_size}")


def _read_lines(path: Path) -> list[str]:
    """The lines of merges.txt, without empty lines and the line with its version."""
    lines = read_text(path).split("\n")
    return [line for line in lines if line and not line.startswith("#version")]


def _from_vocab_and_merges(vocab: dict[str, int], merges: list[str]) -> dict[str, Any]:
    """The arguments of `Tokenizer` in GPT-2's original files. `merges` are the lines of merges.txt."""
    end_of_text = "<|endoftext|>"
    special = [AddedToken(vocab[end_of_text], end_of_text)] if end_of_text in vocab else []
    return {"vocab": vocab, "merges": merge_pairs(merges), "added_tokens": special}


def merge_pairs(merges: list) -> list[tuple[str, str]]:
    """Convert merges, which files write as "a b" or ["a", "b"], to pairs.

    Raises ValueError if one is no pair.
    """
    pairs = []
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if len(pair) != 2:
            raise ValueError(f"merge {rank}, {merge!r}, is not a pair")
        left, right = pair
        pairs.append((left, right))
    return pairs


def _from_tokenizer_json(raw: dict) -> dict[str, Any]:
    """The arguments of `Tokenizer` in the content of a tokenizer.json.

    A file with "byte_fallback" describes a SentencePiece tokenizer, which Part 20's module reads. Raises
    ValueError, which names the setting, if the file describes another kind of tokenizer.
    """
    model = raw["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"model is {model.get('type')}, only byte-level BPE is supported")
    byte_fallback = model.get("byte_fallback")
    if byte_fallback and not find_spec(SENTENCEPIECE):
        raise ValueError("model is byte_fallback, only byte-level BPE is supported")
    for setting in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(setting):
            raise ValueError(f"model.{setting}={model[setting]!r} is not supported")
    if byte_fallback:
        return import_module(SENTENCEPIECE).from_tokenizer_json(raw)
    return {
        "vocab": model["vocab"],
        "merges": merge_pairs(model["merges"]),
        "added_tokens": added_tokens(raw),
        "ignore_merges": model.get("ignore_merges", False),
        "normal_form": _normal_form(raw.get("normalizer")),
        "affixes": affixes_of(raw.get("post_processor")),
        **_splitting(raw.get("pre_tokenizer")),
    }


def added_tokens(raw: dict) -> list[AddedToken]:
    """The added tokens in the content of a tokenizer.json. Settings that `AddedToken` lacks are ignored."""
    names = [spec.name for spec in fields(AddedToken)]
    tokens = []
    for entry in raw.get("added_tokens", []):
        settings = {name: value for name, value in entry.items() if name in names}
        tokens.append(AddedToken(**settings))
    return tokens


def steps_of(node: dict | None, steps_field: str) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder of a tokenizer.json.

    `node` is a Sequence, which has its steps in node[steps_field], or a single step, or None, which has no
    steps.
    """
    if node is None:
        return []
    return node[steps_field] if node["type"] == "Sequence" else [node]


def _normal_form(node: dict | None) -> str | None:
    """The Unicode normal form of a normalizer, or None without one.

    Raises ValueError for other normalizers.
    """
    forms = [step["type"] for step in steps_of(node, "normalizers")]
    if len(forms) > 1 or not set(forms) <= set(NORMAL_FORMS):
        raise ValueError(
            f"normalizer {' + '.join(forms)} is not supported, only one of {', '.join(NORMAL_FORMS)}"
        )
    return forms[0] if forms else None


def _splitting(node: dict | None) -> dict[str, Any]:
    """The arguments `pattern` and `add_prefix_space` of `Tokenizer`, from a pre-tokenizer.

    Supported are ByteLevel alone (GPT-2), and Split by a regular expression before ByteLevel (Llama 3, Qwen).
    Raises ValueError for any other pre-tokenizer.
    """
    steps = steps_of(node, "pretokenizers")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return {"pattern": GPT2_PATTERN, "add_prefix_space": steps[0].get("add_prefix_space", False)}
    if kinds == ["Split", "ByteLevel"]:
        split, byte_level = steps
        for step, name, accepted in (
            (split, "behavior", "Isolated"),
            (split, "invert", False),
            (byte_level, "use_regex", False),
            (byte_level, "add_prefix_space", False),
        ):
            if step.get(name) != accepted:
                raise ValueError(f"pre_tokenizer {step['type']}.{name}={step.get(name)!r} is not supported")
        pattern = split["pattern"].get("Regex") or regex.escape(split["pattern"]["String"])
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"pre_tokenizer Split.pattern {pattern!r} does not compile: {error}") from None
        return {"pattern": pattern}
    raise ValueError(f"pre_tokenizer {' + '.join(kinds) or 'none'} is not supported, only byte-level ones")


def affixes_of(node: dict | None) -> Affixes:
    """The ids that a post-processor puts before and after a text.

    Raises ValueError if a step of the post-processor is not supported.
    """
    before: list[int] = []
    after: list[int] = []
    for step in steps_of(node, "processors"):
        if step["type"] == "TemplateProcessing":
            side = before
            for item in step["single"]:  # the template of a single text
                if "Sequence" in item:  # the place of the text itself
                    side = after
                else:
                    side.extend(step["special_tokens"][item["SpecialToken"]["id"]]["ids"])
        elif step["type"] != "ByteLevel":
            raise ValueError(f"post_processor {step['type']} is not supported")
    return Affixes(before, after)
