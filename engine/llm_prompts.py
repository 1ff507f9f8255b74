"""What a user may hand to `LLM`: prompts in vLLM's forms, and conversations. Part 20.

Promises a record per prompt, or a ParameterError that says what is accepted. Checks forms only: whether a
prompt fits the model, the engine says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt

# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with or without a "cache_salt".
PromptInput = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]  # {"role": …, "content": text, or a list of {"type": "text", "text": …}}
FORMS = ("prompt_token_ids", "prompt")


@dataclass(frozen=True)
class Asked:
    """One request: what the model reads, what the user sees of it, and options of `LLMEngine`."""

    prompt: Prompt
    shown: str | None = None  # None: it came as token ids
    options: dict[str, Any] = field(default_factory=dict)


def read_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[Asked]:
    """One prompt or several, in order. Raises ParameterError for what is none."""
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts) or not isinstance(prompts, Iterable):
        return [read_prompt(prompts)]
    return [read_prompt(prompt) for prompt in prompts]


def read_prompt(prompt: PromptInput) -> Asked:
    """Raises ParameterError for what is no prompt."""
    if isinstance(prompt, str):
        return Asked(prompt, prompt)
    if _is_ids(prompt):
        return Asked(prompt)
    if isinstance(prompt, Mapping):
        given = [form for form in FORMS if form in prompt]
        unknown = [key for key in prompt if key not in (*FORMS, "cache_salt")]
        if given and not unknown:
            salt = prompt.get("cache_salt")
            asked = read_prompt(prompt[given[0]])
            shown = prompt.get("prompt", asked.shown)  # ids may come with the text they stand for
            return Asked(asked.prompt, shown, {"cache_salt": salt} if salt is not None else {})
    raise ParameterError(
        "prompt",
        f"prompt={prompt!r}: text, token ids, or a dict with prompt_token_ids or prompt, and cache_salt, is "
        "accepted",
    )


def each(name: str, given: Any, number: int, one: type) -> list:
    """`given` for each of so many prompts: None or a `one` for all, or a list with one for each.

    Raises ParameterError: they are of another kind, or there are not as many.
    """
    if given is None or isinstance(given, one):
        return [given] * number
    entries = list(given) if isinstance(given, Iterable) else [given]
    if not all(entry is None or isinstance(entry, one) for entry in entries):
        raise ParameterError(name, f"{name}={given!r}: {one.__name__} is accepted, or a list of them")
    if len(entries) != number:
        raise ParameterError(name, f"{name} has {len(entries)} entries for {number} prompts")
    return entries


def read_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[dict]]:
    """One conversation or several, as a chat template wants them. Raises ParameterError."""
    one = bool(messages) and isinstance(messages[0], Mapping)
    found = [[_message(message) for message in turns] for turns in ([messages] if one else messages)]
    if not all(found):
        raise ParameterError("messages", "messages: a conversation has at least one message")
    return found


def _message(message: Message) -> dict[str, str]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list) and content and all(_is_text(part) for part in content):
        content = "\n".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise ParameterError(
            "messages",
            f"messages: {message!r}: a role, and a content of text or of text parts, are accepted",
        )
    return {**message, "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_ids(prompt: Any) -> bool:
    """Whether this is a prompt as token ids; an empty list is no prompt at all."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and all(issubclass(kind, int) for kind in set(map(type, prompt)))
    )


def default_params(generation_config: Mapping[str, Any]) -> SamplingParams:
    """What a model's makers want where nobody says otherwise, from its generation_config.json, as in vLLM."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    wishes = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    if (longest := generation_config.get("max_new_tokens")) is not None:
        wishes["max_tokens"] = longest
    return SamplingParams(**wishes)
