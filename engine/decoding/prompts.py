"""A prompt as token ids, checked against the model. Part 2."""

from collections.abc import Sequence

from engine.config import ModelConfig
from engine.decoding.params import ParameterError
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]


def prompt_token_ids(prompt: Prompt, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Token ids of a text, or the given ids once each is known to the model.

    Raises ParameterError (field `prompt`): empty, too long to leave room for one token, an id out of range,
    or text that is not Unicode.
    """
    if isinstance(prompt, str):
        try:
            token_ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise ParameterError("prompt", f"prompt: {error}") from None
    else:
        token_ids = list(prompt)
        for id in token_ids:
            if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < config.vocab_size:
                raise ParameterError(
                    "prompt", f"prompt has token id {id!r}; accepted are 0 to {config.vocab_size - 1}"
                )
    if not 0 < len(token_ids) < config.max_positions:
        raise ParameterError(
            "prompt",
            f"prompt has {len(token_ids)} tokens; accepted are 1 to {config.max_positions - 1}: this model "
            f"sees {config.max_positions} tokens, and at least one is for the output",
        )
    return token_ids
