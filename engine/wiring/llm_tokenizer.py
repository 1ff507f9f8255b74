"""A tokenizer under Hugging Face's names: it can be called, and has the model's chat template. Part 20.

The ids and texts are those of the engine's own `Tokenizer` and `ChatTemplate`.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.decoding.chat_template import ChatError, ChatTemplate, chat_prompt
from engine.decoding.params import ParameterError
from engine.models.config import ModelConfig
from engine.text.tokenizer import Tokenizer
from engine.wiring.llm_prompts import read_conversations


class Encoding(dict[str, Any]):
    """What a called tokenizer returns: `input_ids`, as a key and as an attribute. For one text they are the
    text's ids, and for a list of texts one list each.
    """

    @property
    def input_ids(self) -> Any:
        """list[int] for one text, list[list[int]] for a list of texts."""
        return self["input_ids"]


class ChatTokenizer:
    """A tokenizer and a chat template, under Hugging Face's names."""

    def __init__(self, tokenizer: Tokenizer, name: str | Path, config: ModelConfig) -> None:
        """`name` is the model, or the folder, that has the chat template. `config` is the engine's: it bounds
        a conversation.
        """
        self.tokenizer, self.name, self.config = tokenizer, name, config
        self.eos_token_id, self.vocab_size = tokenizer.eos_token_id, tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        """The ids of a text, or of each text of a list."""
        if isinstance(text, str):
            return Encoding(input_ids=self.encode(text, add_special_tokens))
        return Encoding(input_ids=[self.encode(part, add_special_tokens) for part in text])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """As `Tokenizer.decode`; a single id is accepted, too."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The conversation as the model reads it: token ids, or with `tokenize=False` the text.

        The ids are those of `LLM.chat`: a message that spells a special token does not become one.
        `variables` are the template's, such as Qwen3's `enable_thinking`. Raises ParameterError if this is
        no conversation, if there is no template or if it refuses the conversation, and for ids as
        `chat_prompt` does; CheckpointError if the template cannot be read.
        """
        messages = read_conversations([conversation])[0]  # a list of several conversations is refused
        template = chat_template_of(self.name, chat_template)
        try:
            if not tokenize:
                return template.render(messages, add_generation_prompt, continue_final_message, variables)
            _, ids = chat_prompt(
                messages,
                template,
                self.tokenizer,
                self.config,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
            )
        except ChatError as error:
            raise ParameterError("messages", f"messages: {error}") from None
        return ids


def chat_template_of(name: str | Path, source: str | None = None) -> ChatTemplate:
    """The template in `source`, or by default that of the model `name`. Raises ParameterError if the model
    has no template, and CheckpointError if a template cannot be read.
    """
    template = ChatTemplate.from_pretrained(name, source)
    if template is None:
        raise ParameterError(
            "chat_template", f"model {str(name)!r} has no chat template: give one, or generate"
        )
    return template
