"""A conversation as the text its model was trained on: the checkpoint's own chat template. Part 14.

Promises the text of Hugging Face's `apply_chat_template`, and a way to keep special tokens the template's
own (`guarded`). A template is a small program (Jinja) that comes with a checkpoint: it runs in a sandbox
(template_sandbox.py), which keeps it from this process and its files, and bounds its time and its length.
Knows no roles: which there are, and in which order, is the template's business. Document:
https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from engine.decoding.prompts import prompt_token_ids
from engine.decoding.template_sandbox import BoundedEnvironment, render, to_text
from engine.models.checkpoint import CheckpointError, read_json, read_text, resolve
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_TEMPLATE_CHARACTERS = 1_000_000
GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters: Unicode keeps them out of every text
# What a template may raise, beside Jinja's own errors.
FAILURES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class ChatError(ValueError):
    """The template refuses a conversation, in its own words, or fails."""


def guarded(
    messages: Sequence[Mapping[str, str]], special_tokens: Collection[str]
) -> tuple[list[dict[str, str]], str]:
    """The messages with a guard in every special token that their contents spell, and that guard.

    Who writes "<|assistant|>" into a message must not begin a turn by it. So a character stands behind the
    first one of each such text, also where two of them overlap, and the text is that token's no longer;
    `Tokenizer.encode` takes the guard out again, once it has found the special tokens. It is the first of
    GUARDS that no content has. Nothing else is changed, the messages given stay as they are, and without
    special tokens there is nothing to guard. (A token of a single character has no place for a guard: it is
    not kept out.) Raises ChatError: all of GUARDS are in use.
    """
    contents = "".join(message["content"] for message in messages)
    guard = next((guard for guard in GUARDS if guard not in contents), None)
    if guard is None:
        raise ChatError(f"the contents hold all {len(GUARDS)} noncharacters from U+FDD0 on")
    guarded_messages = []
    for message in messages:
        content, cuts = message["content"], set()  # cuts: where a guard is put in
        for token in special_tokens:
            start = content.find(token)
            while start >= 0:
                cuts.add(start + 1)
                start = content.find(token, start + 1)  # what overlaps is found, too
        pieces = (content[a:b] for a, b in pairwise([0, *sorted(cuts), len(content)]))
        guarded_messages.append({**message, "content": guard.join(pieces)})
    return guarded_messages, guard


class ChatTemplate:
    """How a conversation is written down for one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens`: bos_token and its kin, which templates may use. Raises CheckpointError: `source`
        is no template.
        """
        environment = BoundedEnvironment([loopcontrols, _Generation], {"tojson": _to_json})
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"the chat template has {len(source):,} characters: at most {MAX_TEMPLATE_CHARACTERS:,}"
            )
        try:
            self._template = environment.from_string(source)
        except (TemplateError, SyntaxError, *FAILURES) as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "ChatTemplate | None":
        """The template of an embedded model, a folder or a hub id: chat_template.jinja, else what
        tokenizer_config.json says; of several, the one called default. None: the model has none.

        Raises CheckpointError for a file that cannot be read.
        """
        folder = resolve(name)
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        source = config.get("chat_template")
        if isinstance(source, list):  # of {"name", "template"}
            templates = {
                entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
            }
            source = templates.get("default")
        file = folder / "chat_template.jinja"
        if file.exists():
            source = read_text(file)
        if not isinstance(source, str):
            return None
        tokens = {name: _text(config.get(name)) for name in SPECIAL_TOKENS}
        return cls(source, {name: text for name, text in tokens.items() if text is not None})

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of these messages ({"role", "content"}), and the beginning of the answer to come.

        There are neither tools nor documents, and a template may ask whether there are. Raises ChatError: the
        template refuses the messages, fails, or takes too much.
        """
        try:
            return render(
                self._template,
                {
                    "messages": list(messages),
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self.special_tokens,
                },
            )
        except TemplateError as error:
            raise ChatError(str(error)) from None
        except FAILURES as error:
            raise ChatError(f"the model's chat template failed: {type(error).__name__}: {error}") from None


def chat_prompt(
    messages: Sequence[Mapping[str, str]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: ModelConfig,
    add_generation_prompt: bool = True,
) -> tuple[str, list[int]]:
    """(text, token ids) of a conversation, as the model reads it. The template writes special tokens itself:
    the tokenizer adds none, and contents give none. Raises ChatError or ParameterError.
    """
    special_tokens = [token.content for token in tokenizer.added.values() if token.special]
    messages, guard = guarded(messages, special_tokens)
    text = template.render(messages, add_generation_prompt)
    ids = prompt_token_ids(text, tokenizer, config, add_special_tokens=False, guard=guard)
    return text.replace(guard, ""), ids


class _Generation(Extension):
    """`{% generation %}`: around what the model says, for those who train it. Here, no more than its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _text(token: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or a record with it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _refuse(message: object) -> NoReturn:
    """`raise_exception` in a template."""
    raise TemplateError(to_text(message))


def _now(format: str) -> str:
    """`strftime_now` in a template: the time of day."""
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As Hugging Face's, and unlike Jinja's own: nothing is escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
