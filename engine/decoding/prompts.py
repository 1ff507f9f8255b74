"""A prompt as token ids, checked against the model. Part 2."""

from collections.abc import Sequence
from typing import NoReturn

from engine.decoding.params import ParameterError
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prompt_token_ids(
    prompt: Prompt,
    tokenizer: Tokenizer,
    config: ModelConfig,
    add_special_tokens: bool = True,
    guard: str = "",
) -> list[int]:
    """Token ids of a text, or the given ids once each is known to the model. `add_special_tokens`: those that
    the tokenizer puts around every text; a chat template writes its own (Part 14). `guard`: as in `encode`.

    Raises ParameterError (field `prompt`): empty, too long to leave room for one token, an id out of range
    (a tokenizer may have more tokens than the model), or text that is not Unicode. What is too long is
    refused before it is worked on: a text so long that no tokenizing could make it fit costs nothing.
    """
    if not isinstance(prompt, str):
        _check_length(len(prompt), config)
        _check_ids(prompt, config.vocab_size)
        return list(prompt)
    min_length = tokenizer.fewest_tokens(prompt.replace(guard, ""))
    if min_length >= config.max_positions:
        _refuse_length(f"at least {min_length}", config)
    try:
        token_ids = tokenizer.encode(prompt, add_special_tokens, guard)
    except ValueError as error:
        raise ParameterError("prompt", f"prompt: {error}") from None
    _check_length(len(token_ids), config)
    largest = max(token_ids)
    if largest >= config.vocab_size:
        text = tokenizer.decode([largest])
        raise ParameterError(
            "prompt",
            f"prompt has {text!r:.80}, which this model does not know: its token id is {largest}; "
            f"accepted are 0 to {config.vocab_size - 1}",
        )
    return token_ids


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ParameterError for the first that is no whole number from 0 to vocab_size - 1."""
    # Nearly all prompts end here, without a loop in Python.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for token_id in token_ids:
        is_whole = isinstance(token_id, int) and not isinstance(
            token_id, bool
        )  # a NumPy integer is no int: refused
        if not (is_whole and 0 <= token_id < vocab_size):
            raise ParameterError(
                "prompt", f"prompt has token id {token_id!r}; accepted are 0 to {vocab_size - 1}"
            )


def _check_length(num_tokens: int, config: ModelConfig) -> None:
    """Raises ParameterError: no token, or too many."""
    if not 0 < num_tokens < config.max_positions:
        _refuse_length(str(num_tokens), config)


def _refuse_length(num_tokens: str, config: ModelConfig) -> NoReturn:
    raise ParameterError(
        "prompt",
        f"prompt has {num_tokens} tokens; accepted are 1 to {config.max_positions - 1}: this model sees "
        f"{config.max_positions} tokens, and at least one is for the output",
    )
