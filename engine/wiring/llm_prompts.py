"""Reads the prompts and conversations that users hand to `LLM`, in the forms that vLLM accepts. Part 20.

Only the form of a prompt is checked here. The engine checks whether the prompt fits the model.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, TypeGuard

from engine.decoding.params import ParameterError
from engine.decoding.prompts import Prompt

# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with or without a "cache_salt".
PromptInput = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": …, "content": text, or a list of {"type": "text", "text": …}}


class TextPrompt(TypedDict):
    """A prompt as text. `cache_salt` keeps its prefix to those prompts that have the same salt."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is its text as outputs show it."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt for the engine, and the options of its request."""

    prompt: Prompt  # text, or token ids
    text: str | None = None  # the prompt as the outputs show it; None if only token ids were given
    options: dict[str, Any] = field(default_factory=dict)  # of LLMEngine.make_requests, such as cache_salt


def read_prompts(prompts: object) -> list[ParsedPrompt]:
    """Read one PromptInput or several. Returns one ParsedPrompt each, in order. Raises ParameterError if one
    of them has another form.
    """
    # Bytes are refused as one prompt, and not number by number.
    is_single_prompt = isinstance(prompts, str | bytes | bytearray | Mapping) or _is_ids(prompts)
    if is_single_prompt or not isinstance(prompts, Iterable):
        return [read_prompt(prompts)]
    return [read_prompt(prompt) for prompt in prompts]


def read_prompt(prompt: object) -> ParsedPrompt:
    """Read one PromptInput. Raises ParameterError if `prompt` has another form."""
    if isinstance(prompt, str):
        return ParsedPrompt(prompt, prompt)
    if _is_ids(prompt):
        return ParsedPrompt(prompt)
    if isinstance(prompt, Mapping) and set(prompt) <= {"prompt_token_ids", "prompt", "cache_salt"}:
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        options = {} if salt is None else {"cache_salt": salt}
        if isinstance(text, str | None) and _is_ids(ids):  # the ids count; their text is only shown
            return ParsedPrompt(ids, text, options)
        if isinstance(text, str) and ids is None:
            return ParsedPrompt(text, text, options)
    raise ParameterError(
        "prompt",
        f"prompt={prompt!r}: text, token ids, or a dict with prompt_token_ids or prompt, and cache_salt, is "
        "accepted",
    )


def per_prompt(name: str, value: Any, num_prompts: int, kind: type) -> list:
    """The argument called `name` as a list with an entry for each prompt.

    `value` is None, or an object of type `kind` for all prompts, or an iterable of such objects and None.
    Raises ParameterError if an entry has another type, or if there are not `num_prompts` entries.
    """
    if value is None or isinstance(value, kind):
        return [value] * num_prompts
    entries = list(value) if isinstance(value, Iterable) else [value]
    if not all(entry is None or isinstance(entry, kind) for entry in entries):
        raise ParameterError(name, f"{name}={value!r}: {kind.__name__} is accepted, or a list of them")
    if len(entries) != num_prompts:
        raise ParameterError(name, f"{name} has {len(entries)} entries for {num_prompts} prompts")
    return entries


def set_priorities(prompts: Sequence[ParsedPrompt], priority: Sequence[int] | None) -> None:
    """Put each prompt's priority into its options. Raises ParameterError if a priority is no whole number, or
    if there are not as many priorities as prompts.
    """
    priorities = per_prompt("priority", priority, len(prompts), int)
    for prompt, prompt_priority in zip(prompts, priorities, strict=True):
        if prompt_priority is not None:
            prompt.options["priority"] = prompt_priority


def read_conversations(messages: object) -> list[list[dict[str, Any]]]:
    """Read one conversation, which is a list of Messages, or a list of conversations. Returns a list of
    conversations in which every message's content is text. Raises ParameterError if the form is another, or
    if a conversation is empty.
    """
    conversations = messages
    if _is_list(messages) and messages and isinstance(messages[0], Mapping):
        conversations = [messages]
    if not _is_list(conversations) or not all(_is_list(conversation) for conversation in conversations):
        raise ParameterError(
            "messages",
            f"messages={messages!r:.80}: a list of messages is expected, such as "
            '[{"role": "user", "content": "Hello"}], or several such lists',
        )
    if not all(conversations):
        raise ParameterError("messages", "messages: a conversation has at least one message")
    return [[_read_message(message) for message in conversation] for conversation in conversations]


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a sequence, and neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _read_message(message: object) -> dict[str, Any]:
    """The message, with its text parts joined by line breaks, and the arguments of its calls as objects, as
    templates expect. An assistant's message without a content has an empty text. Raises ParameterError if
    `message` is not a mapping with a role and a content, or if the arguments of a call are not JSON.
    """
    if isinstance(message, Mapping):
        role, content = message.get("role"), message.get("content")
        if content is None and role == "assistant":
            content = ""
        if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
            content = "\n".join(part["text"] for part in content)
        if isinstance(role, str) and isinstance(content, str):
            read_message = {**message, "content": content}
            calls = message.get("tool_calls")
            if isinstance(calls, list):
                read_message["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
            return read_message
    raise ParameterError(
        "messages",
        f"messages: {message!r}: a role, and a content of text or of text parts, are accepted",
    )


def _with_parsed_arguments(call: Any) -> Any:
    """A call of an assistant's message. If its arguments are JSON text, as in OpenAI's API, they become the
    object that the text stands for. Raises ParameterError if the text is not JSON.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = function["arguments"]
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    except ValueError:
        message = f"messages: the arguments of a call, {arguments!r:.80}, are not JSON"
        raise ParameterError("messages", message) from None


def _is_text_part(part: Any) -> bool:
    """Whether `part` is {"type": "text", "text": text}."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    """Whether `prompt` is a sequence of token ids with at least one id. Bytes are refused, although Python
    takes them for a sequence of integers: they are text that was not decoded.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, str | bytes | bytearray | memoryview):
        return False
    kinds = set(map(type, prompt))  # a set of types is faster to check than each id of a long prompt
    return bool(kinds) and all(issubclass(kind, int) for kind in kinds)
