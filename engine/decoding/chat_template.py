"""Writes a conversation as the text that a model was trained on, by the checkpoint's chat template. Part 14.

Promises the text of Hugging Face's `apply_chat_template`. `chat_prompt` and `guarded_text` ensure that only
the template writes special tokens of more than one character, and no message or tool. A template is a small
Jinja program that comes with a checkpoint. It runs in a sandbox (template_sandbox.py), which keeps it from
this process and its files, and limits its time and the length of its text. Does not know which roles there
are, or in which order: the template checks the roles.
Document: https://huggingface.co/docs/transformers/chat_templating
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols

from engine.decoding.params import ParameterError
from engine.decoding.prompts import prompt_token_ids
from engine.decoding.template_functions import Generation, raise_exception, strftime_now, tojson
from engine.decoding.template_sandbox import BoundedEnvironment, render
from engine.models.checkpoint import CheckpointError, read_json, read_text, resolve
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_TEMPLATE_CHARACTERS = 1_000_000
GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters, which no text should have
# Names that `variables` may not have: they are arguments of their own, here or in vLLM.
ARGUMENTS = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
# Fields of a message in whose texts special tokens are guarded, wherever in the field they stand.
EXTRA_FIELDS = ("tool_calls", "reasoning", "reasoning_content")
GUARDED_FIELDS = ("content", *EXTRA_FIELDS)
# Errors that a template may raise beside Jinja's own errors.
FAILURES = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError,
)  # fmt: skip


class ChatError(ValueError):
    """The template refuses a conversation, or fails.

    The message has the words of the template or the error.
    """


def guarded(
    messages: Sequence[Mapping[str, str]], special_tokens: Collection[str]
) -> tuple[list[dict[str, str]], str]:
    """Return (guarded messages, guard): copies of the messages in which no content spells a special token.

    A user who writes "<|assistant|>" into a message must not begin a new turn. So a guard, a single
    character, is inserted after the first character of every special token in a content, also where two
    special tokens overlap. The content then has no special token, but for those of a single character, which
    have no place for a guard. `Tokenizer.encode` removes the guard after it has found the special tokens. The
    guard is the first of GUARDS that no content has. Nothing else changes, the given messages do not change,
    and without special tokens no guard is inserted. Raises ChatError if the contents use all of GUARDS.
    """
    contents = "".join(message["content"] for message in messages)
    guard = next((guard for guard in GUARDS if guard not in contents), None)
    if guard is None:
        raise ChatError(f"the contents hold all {len(GUARDS)} noncharacters from U+FDD0 on")
    guarded_messages = []
    for message in messages:
        content = message["content"]
        cuts: set[int] = set()  # the indices where a guard is inserted
        for token in special_tokens:
            start = content.find(token)
            while start >= 0:
                cuts.add(start + 1)
                start = content.find(token, start + 1)  # also finds a token that overlaps this one
        ends = [0, *sorted(cuts), len(content)]
        pieces = [content[begin:end] for begin, end in pairwise(ends)]
        guarded_messages.append({**message, "content": guard.join(pieces)})
    return guarded_messages, guard


class ChatTemplate:
    """The chat template of one model."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """A template from its Jinja source.

        `special_tokens` maps names such as "bos_token", which the template may use, to texts. Raises
        CheckpointError if `source` is not a template, or has more than MAX_TEMPLATE_CHARACTERS.
        """
        environment = BoundedEnvironment([loopcontrols, Generation], {"tojson": tojson})
        environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise CheckpointError(
                f"the chat template has {len(source):,} characters: at most {MAX_TEMPLATE_CHARACTERS:,}"
            )
        try:
            self._template = environment.from_string(source)
            # Names that the template reads and does not define itself: `messages`, `enable_thinking`.
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except (TemplateError, SyntaxError, *FAILURES) as error:
            raise CheckpointError(f"the chat template cannot be read: {error}") from None
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_pretrained(cls, name: str | Path, replacement: str | None = None) -> "ChatTemplate | None":
        """Read the template of an embedded model, a folder or a hub id. Returns None if the model has none.

        The template is in chat_template.jinja, else in tokenizer_config.json. If tokenizer_config.json has
        several templates, the template "default" is read. `replacement` is the Jinja text of a template that
        takes the place of the model's; the special tokens are still the model's. Raises CheckpointError if a
        file cannot be read.
        """
        folder = resolve(name)
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.exists() else {}
        source = _source(folder, config) if replacement is None else replacement
        if not isinstance(source, str):
            return None
        special_tokens: dict[str, str] = {}
        for token_name in SPECIAL_TOKENS:
            text = _token_text(config.get(token_name))
            if text is not None:
                special_tokens[token_name] = text
        return cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of `messages`, which are dicts with "role" and "content".

        With `add_generation_prompt`, the text ends with the beginning of the model's answer. With
        `continue_final_message`, the text ends with the content of the last message (there must be one), so
        that the model writes on in that message. `variables` are further variables of the template, such as
        Qwen3's `enable_thinking`; a template ignores variables that it does not read. `tools` are the
        functions that the model may call, as JSON, for templates that list them. The variable `documents`,
        which some templates read, is None unless it is in `variables`. Raises ChatError if the template
        refuses the messages, fails, leaves out the message to continue, or exceeds the sandbox's limits.
        """
        messages = list(messages)
        mark = uuid4().hex  # random, so that no content has it; it marks where the last message ends
        if continue_final_message:
            last = messages[-1]
            messages[-1] = {**last, "content": f"{last['content']}{mark} "}
        values: dict[str, Any] = {  # a later entry replaces an earlier one of its name
            "documents": None,
            **self.special_tokens,
            **(variables or {}),
            "tools": tools or None,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = render(self._template, values)
        except TemplateError as error:
            raise ChatError(str(error)) from None
        except FAILURES as error:
            raise ChatError(f"the model's chat template failed: {type(error).__name__}: {error}") from None
        if not continue_final_message:
            return text
        beginning, found_mark, rest = text.rpartition(mark)
        if not found_mark:
            raise ChatError("the model's chat template leaves out the last message, which is to be continued")
        # If the template has removed the space behind the mark, it removes spaces at the end of a content. So
        # it would have removed those before the mark, too, without the mark.
        return beginning if rest.startswith(" ") else beginning.rstrip()


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: ModelConfig,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] | None = None,
    truncate: int | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[int]]:
    """Return (text, token ids) of a conversation, as the model reads it.

    `add_generation_prompt`, `continue_final_message`, `variables` and `tools` are as in
    `ChatTemplate.render`. `truncate` is as in `prompt_token_ids`. Only the template writes special tokens:

    - Special tokens in `tools`, and in GUARDED_FIELDS of messages, are encoded as ordinary text.
    - Other fields of messages and `variables` may not have any.
    - The tokenizer adds those that it puts around every text only with `add_special_tokens`.

    Raises ChatError as `guarded` and `ChatTemplate.render` do, and for a special token where none may be.
    Raises ParameterError as `prompt_token_ids` does, for `add_generation_prompt` and
    `continue_final_message` together, and for `variables` that are arguments of their own (the error's field
    is vLLM's, `chat_template_kwargs`).
    """
    text, guard = guarded_text(
        messages, template, tokenizer, add_generation_prompt, continue_final_message, variables, tools
    )
    ids = prompt_token_ids(
        text, tokenizer, config, add_special_tokens=add_special_tokens, guard=guard, truncate=truncate
    )
    return text.replace(guard, ""), ids


def guarded_text(
    messages: Sequence[Mapping[str, Any]],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, str]:
    """Return (text, guard) of a conversation, of any length: what `chat_prompt` encodes. The arguments are
    those of `chat_prompt`. `Tokenizer.encode` takes the text with the guard.

    Raises as `chat_prompt` does, but for the errors of `prompt_token_ids`.
    """
    variables = variables or {}
    if add_generation_prompt and continue_final_message:
        raise ParameterError(
            "continue_final_message",
            "continue_final_message=true needs add_generation_prompt=false: the model either continues the "
            "last message or begins a new one",
        )
    arguments = sorted(ARGUMENTS & variables.keys())
    if arguments:
        raise ParameterError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {arguments[0]!r}, which is no variable to be set there",
        )
    special_tokens = [token.content for token in tokenizer.added.values() if token.special]
    messages, tools, guard = _guard_all(messages, tools, variables, special_tokens)
    text = template.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables,
        tools=tools,
    )
    return text, guard


def _guard_all(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    special_tokens: Collection[str],
) -> tuple[list[dict[str, Any]], Any, str]:
    """(guarded messages, guarded tools, guard), as in `guarded`, for all texts that the template may write.

    Raises ChatError if a field that is not in GUARDED_FIELDS, or one of `variables`, spells a special token.
    Such values (a role, for example) are not guarded, because the template compares them.
    """
    # 1. Collect the texts to guard beside the contents, and the texts that may not spell a special token.
    extra_fields: list[dict[str, Any]] = []
    other_fields: list[dict[str, Any]] = []
    for message in messages:
        extra_fields.append({name: message[name] for name in EXTRA_FIELDS if name in message})
        other_fields.append({name: message[name] for name in message if name not in GUARDED_FIELDS})
    to_guard = _texts_of([extra_fields, tools])
    # The texts themselves and not their JSON, in which a special token such as <|"|> is written differently.
    plain_texts = _texts_of([other_fields, variables])
    for text in plain_texts:
        if any(token in text for token in special_tokens):
            raise ChatError(
                "only a content may spell a special token, and no other field or template variable"
            )
    # 2. Guard them. No text may have the guard already, so `guarded` gets the plain texts, too. It takes
    #    messages, so each text becomes the content of a message of its own.
    texts = [*to_guard, *plain_texts]
    as_messages = [{"content": text} for text in texts]
    results, guard = guarded([*messages, *as_messages], special_tokens)
    guarded_messages, text_results = results[: len(messages)], results[len(messages) :]
    # 3. Put the guarded texts into their places.
    guarded_of = {text: result["content"] for text, result in zip(texts, text_results, strict=True)}
    for message, fields in zip(guarded_messages, extra_fields, strict=True):
        message |= _replaced(fields, guarded_of)
    return guarded_messages, _replaced(tools, guarded_of), guard


def _texts_of(value: Any) -> list[str]:
    """All texts in JSON data, the names of fields included."""
    if isinstance(value, str):
        return [value]
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = (*value.keys(), *value.values())
    elif isinstance(value, list | tuple):
        parts = value
    texts: list[str] = []
    for part in parts:
        texts += _texts_of(part)
    return texts


def _replaced(value: Any, new_texts: Mapping[str, str]) -> Any:
    """A copy of JSON data with new_texts[text] in place of each text, the names of fields included."""
    if isinstance(value, str):
        return new_texts[value]
    if isinstance(value, Mapping):
        return {_replaced(name, new_texts): _replaced(inner, new_texts) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, new_texts) for inner in value]
    return value


def _source(folder: Path, config: Mapping[str, Any]) -> Any:
    """The source of a model's template, in `folder` or in its tokenizer_config.json; None if it has none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    source = config.get("chat_template")
    return _default_template(source) if isinstance(source, list) else source


def _default_template(entries: list[Any]) -> Any:
    """The template "default" of several, each a dict with "name" and "template". None if there is none."""
    template = None
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") == "default":
            template = entry.get("template")
    return template


def _token_text(token: Any) -> str | None:
    """The text of a special token in tokenizer_config.json, which is a string or a dict with "content".

    None for any other value.
    """
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
