"""Converts a prompt to token ids, and checks that the model accepts them. Part 2."""

from collections.abc import Sequence
from typing import NoReturn

from engine.decoding.params import ParameterError
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # text, or token ids


def prompt_token_ids(
    prompt: Prompt,
    tokenizer: Tokenizer,
    config: ModelConfig,
    add_special_tokens: bool = True,
    guard: str = "",
    truncate: int | None = None,
) -> list[int]:
    """The token ids of a prompt: those of its text, or the given ids.

    `add_special_tokens` adds the special tokens that the tokenizer puts around every text. A chat template
    writes its own special tokens (Part 14). `guard` is as in `Tokenizer.encode`. `truncate` is
    `SamplingParams.truncate_prompt_tokens`: the most tokens that are kept, those at the end; -1 keeps as many
    as a prompt may have.

    Raises ParameterError (field `prompt`) if the prompt is empty, if it leaves no room for one token of
    output, if the model does not have one of its ids (a tokenizer may have more ids than the model), or if
    the tokenizer refuses the text. Without `truncate`, a text that is too long for any tokenization is
    refused without encoding it. Given ids that `truncate` cuts off are not checked. Raises ParameterError
    (field `truncate_prompt_tokens`) if more tokens are to be kept than a prompt may have.
    """
    longest = config.max_positions - 1
    if truncate is not None and truncate > longest:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens={truncate}: at most {longest} are accepted, or -1",
        )
    num_kept = longest if truncate == -1 else truncate  # None: all
    if isinstance(prompt, str):
        if num_kept is None:
            _refuse_too_long(prompt.replace(guard, ""), tokenizer, config)
        token_ids = _last(_encode(prompt, tokenizer, add_special_tokens, guard), num_kept)
        _check_length(len(token_ids), config)
        _check_known(token_ids, tokenizer, config.vocab_size)
    else:
        token_ids = _last(prompt, num_kept)
        _check_length(len(token_ids), config)
        _check_ids(token_ids, config.vocab_size)
    return list(token_ids)


def _last(token_ids: Sequence[int], count: int | None) -> Sequence[int]:
    """The last `count` ids, or all if it is None."""
    return token_ids if count is None else token_ids[-count:]


def _encode(text: str, tokenizer: Tokenizer, add_special_tokens: bool, guard: str) -> list[int]:
    """`tokenizer.encode`, but a text that the tokenizer refuses raises ParameterError."""
    try:
        return tokenizer.encode(text, add_special_tokens, guard)
    except ValueError as error:
        raise ParameterError("prompt", f"prompt: {error}") from None


def _refuse_too_long(text: str, tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises ParameterError if even the shortest tokenization of the text that is possible is too long.
    Encodes nothing, since that could take long.
    """
    min_length = tokenizer.fewest_tokens(text)
    if min_length >= config.max_positions:
        _refuse_length(f"at least {min_length}", config)


def _check_known(token_ids: Sequence[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ParameterError, which quotes the text, if the tokenizer has given an id that the model does not
    have.
    """
    largest = max(token_ids)
    if largest >= vocab_size:
        text = tokenizer.decode([largest])
        raise ParameterError(
            "prompt",
            f"prompt has {text!r:.80}, which this model does not know: its token id is {largest}; "
            f"accepted are 0 to {vocab_size - 1}",
        )


def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ParameterError for the first id that is not an int from 0 to vocab_size - 1."""
    # A valid prompt returns here, without the slower loop below.
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return
    for token_id in token_ids:
        # A bool is refused although it is an int, and a NumPy integer because it is none.
        is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not (is_int and 0 <= token_id < vocab_size):
            raise ParameterError(
                "prompt", f"prompt has token id {token_id!r}; accepted are 0 to {vocab_size - 1}"
            )


def _check_length(num_tokens: int, config: ModelConfig) -> None:
    """Raises ParameterError if the prompt is empty, or leaves no room for one token of output."""
    if not 0 < num_tokens < config.max_positions:
        _refuse_length(str(num_tokens), config)


def _refuse_length(length: str, config: ModelConfig) -> NoReturn:
    """Raises ParameterError. `length` is the number of tokens in words, such as "at least 5000"."""
    raise ParameterError(
        "prompt",
        f"prompt has {length} tokens; accepted are 1 to {config.max_positions - 1}: this model sees "
        f"{config.max_positions} tokens, and at least one is for the output",
    )
