"""The fields of OpenAI's completions API, and how they become the engine's own. Part 4.

Promises that every field accepted has its effect: a field nobody knows, or one that this server's engine does
not support, is refused by name. Shapes: https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.decoding.prompts import Prompt
from engine.server.errors import RequestError

MAX_PROMPTS = 256  # of one HTTP request
Number = StrictInt | StrictFloat
TokenIds = Annotated[list[StrictInt], Field(min_length=1)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool | None = None


class CompletionRequest(BaseModel):
    """POST /v1/completions. OpenAI's fields, then those vLLM adds. null means: as if not given."""

    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    prompt: StrictStr | list[StrictStr] | TokenIds | list[TokenIds]
    max_tokens: StrictInt | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: StrictInt | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    stop: StrictStr | list[StrictStr] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: StrictInt | None = None
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None
    best_of: StrictInt | None = None
    suffix: StrictStr | None = None
    user: StrictStr | None = None

    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: StrictInt | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    prompt_logprobs: StrictInt | None = None
    priority: StrictInt | None = None
    cache_salt: StrictStr | None = None

    def prompts(self) -> list[Prompt]:
        """One prompt or several, each text or token ids. Raises RequestError for none."""
        if not self.prompt:
            raise RequestError(400, "prompt is empty", param="prompt")
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = [self.prompt] if one else list(self.prompt)
        if len(prompts) > MAX_PROMPTS:
            message = f"prompt has {len(prompts)} entries; at most {MAX_PROMPTS} are accepted"
            raise RequestError(400, message, param="prompt")
        return prompts

    def sampling_params(self) -> SamplingParams:
        """Raises ParameterError or RequestError for a value out of range or a field we do not have."""
        if self.suffix is not None:
            raise RequestError(
                400, "suffix is not supported: the models here only continue text", param="suffix"
            )
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                400, f"best_of={self.best_of} is not supported, only best_of = n", param="best_of"
            )
        if self.stream_options and not self.stream:
            raise RequestError(400, "stream_options needs stream=true", param="stream_options")
        given = {
            name: getattr(self, name) for name in SamplingParams.__dataclass_fields__ if name != "logit_bias"
        }
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None}, logit_bias=self._bias()
        )

    def _bias(self) -> dict[int, float] | None:
        """JSON's keys are strings; token ids are numbers."""
        try:
            return (
                {int(token_id): bias for token_id, bias in self.logit_bias.items()}
                if self.logit_bias
                else None
            )
        except ValueError:
            raise ParameterError(
                "logit_bias", f"logit_bias={self.logit_bias!r}: keys must be token ids"
            ) from None


class Completions:
    """What a body asks of the engine, and how outputs are shown to its client. A subclass can do more: log
    probabilities and the prompt's echo come that way (Part 10).
    """

    def params(self, body: CompletionRequest) -> SamplingParams:
        """Raises ParameterError or RequestError for a value out of range or a field we do not have."""
        if body.echo:
            message = "echo=true is not supported here: Part 10 (logprobs) brings it"
            raise RequestError(400, message, param="echo")
        return body.sampling_params()

    def options(self, body: CompletionRequest) -> dict[str, Any]:
        """What the engine takes beside prompt and parameters: of these, what was given."""
        given = {"priority": body.priority, "cache_salt": body.cache_salt}
        return {name: value for name, value in given.items() if value is not None}

    def choice(
        self,
        body: CompletionRequest,
        output: RequestOutput,
        sample: CompletionOutput,
        shown: CompletionOutput | None = None,
    ) -> dict:
        """OpenAI's choice, but for its index: what `sample`, one of `output`'s, has beyond what the client
        was shown of it last.
        """
        text = sample.text[len(shown.text) if shown else 0 :]
        return {"text": text, "logprobs": None, "finish_reason": sample.finish_reason}

    def usage(self, body: CompletionRequest, outputs: Sequence[RequestOutput]) -> dict:
        """Tokens of all prompts and of all their completions."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
