"""Turns the conversations that users hand to `LLM.chat` into prompts. Part 20."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.structured import StructureError
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer
from engine.wiring.extensions import STRUCTURED_OUTPUT, is_here
from engine.wiring.llm_prompts import ParsedPrompt


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become prompts: the arguments of `LLM.chat` with these names."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None

    def __post_init__(self) -> None:
        """Raises ParameterError for tools that are refused."""
        if self.tools and not is_here(STRUCTURED_OUTPUT):
            raise ParameterError("tools", "tools come with Extension B: None or [] is accepted")
        if not all(isinstance(tool, Mapping) for tool in self.tools or ()):
            raise ParameterError("tools", "tools: a list of JSON objects is accepted, one for each tool")


def conversation_prompt(
    conversation: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: ModelConfig,
    params: SamplingParams,
) -> ParsedPrompt:
    """The prompt of one conversation, cut at its beginning if `params.truncate_prompt_tokens` says so.

    Raises ParameterError if the template refuses the conversation, and as `chat_prompt` does.
    """
    try:
        text, ids = chat_prompt(
            conversation,
            template,
            tokenizer,
            config,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            variables=options.chat_template_kwargs,
            truncate=params.truncate_prompt_tokens,
            tools=options.tools,
        )
    except ChatError as error:
        raise ParameterError("messages", f"messages: {error}") from None
    return ParsedPrompt(ids, text)


def params_for_rest(params: SamplingParams, beginning: str) -> SamplingParams:
    """The parameters for the rest of a text that begins with `beginning`. A constraint on the output then
    holds for the beginning and the output together. Raises ParameterError if `continuing` refuses it.
    """
    if params.structured_outputs is None:
        return params
    try:
        structure = params.structured_outputs.continuing(beginning)
    except StructureError as error:
        raise ParameterError("messages", f"messages: the content that is to be continued: {error}") from None
    return replace(params, structured_outputs=structure)
