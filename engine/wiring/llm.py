"""`LLM`: generates text for a list of prompts, with vLLM's names and types. Part 20.

    llm = LLM("storyteller")
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=50))[0].outputs[0].text)

All prompts of a call run together, by continuous batching. `EngineArgs` has the other options.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from engine.cache.paged import PagedCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.lora.request import LoRARequest
from engine.machine.collector import rare_collections
from engine.telemetry.metrics import EngineMetrics
from engine.wiring.compose import build_engine, load_adapters_on_demand
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import optional_module
from engine.wiring.generation_config import recommended_values
from engine.wiring.llm_absent import ABSENT
from engine.wiring.llm_chat import ChatOptions, conversation_prompt, params_for_rest
from engine.wiring.llm_metrics import Metric, read_metrics
from engine.wiring.llm_progress import Progress, UseTqdm
from engine.wiring.llm_prompts import (
    Message,
    ParsedPrompt,
    PromptInput,
    per_prompt,
    read_conversations,
    read_prompt,
    read_prompts,
    set_priorities,
)
from engine.wiring.llm_tokenizer import ChatTokenizer, chat_template_of

Params = SamplingParams | Sequence[SamplingParams | None] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """An engine for offline use. `generate` and `chat` return when their outputs are finished; `stream`
    yields its output while it grows. Use an LLM in one thread only.
    """

    def __init__(
        self, model: str | Path = "storyteller", *, disable_log_stats: bool = True, **options
    ) -> None:
        """Load `model`: an embedded model's name, a folder or a hub id. `options` are fields of EngineArgs.
        With `disable_log_stats=False`, `get_metrics` has the engine's metrics.

        Raises CheckpointError if a model or tokenizer cannot be loaded, ValueError if an option's value is
        refused, and TypeError if an option is unknown.
        """
        start = time.perf_counter()
        self.args = EngineArgs(model=model, **options)
        self.engine = build_engine(self.args)
        self.tokenizer, self.config = self.engine.tokenizer, self.engine.config
        self.load_seconds = time.perf_counter() - start
        load_adapters_on_demand(self.engine)
        self._metrics = None if disable_log_stats else EngineMetrics(self.engine, str(self.args.model))
        self._request_numbers = count()
        self._inbox: dict[str, RequestOutput] = {}  # by request id: the latest output, if not read yet

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        *,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Returns one finished RequestOutput per prompt, in the prompts' order.

        `sampling_params` is one for all prompts or a list with one for each; None means
        `get_default_sampling_params`. `priority` is a list with a number for each prompt: lower numbers are
        served first. `lora_request` is one adapter for all prompts or a list with one for each, in which None
        means the base model; it needs `enable_lora`. `use_tqdm` is described at `Progress`.

        Raises ParameterError if a field or a prompt is refused, and CheckpointError if an adapter cannot be
        read: nothing is generated then. Raises RuntimeError if a request fails.
        """
        parsed = read_prompts(prompts)
        set_priorities(parsed, priority)
        self._set_adapters(parsed, lora_request)
        return self._complete(parsed, self._params_of_each(sampling_params, len(parsed)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Answer each conversation. Returns one finished RequestOutput per conversation, in order.

        `messages` is one conversation, which is a list of {"role": …, "content": …}, or a list of
        conversations. `chat_template` is Jinja text that replaces the model's own template;
        `chat_template_kwargs` are further variables of the template, such as Qwen3's `enable_thinking`. With
        `add_generation_prompt` the prompt ends with the marker that begins the assistant's turn. With
        `continue_final_message` (and without `add_generation_prompt`) the model writes on in the last
        message; a constraint on the output (`structured_outputs`) holds for all of that message. `tools` are
        JSON objects as in OpenAI's chat API, for a template that tells of tools; they come with Extension B.
        The other arguments are those of `generate`.

        Raises ParameterError if a field is refused, if the template refuses a conversation, or if there is no
        template; CheckpointError if a template or an adapter cannot be read; RuntimeError if a request
        fails.
        """
        options = ChatOptions(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        template = chat_template_of(self.args.tokenizer or self.args.model, chat_template)
        conversations = read_conversations(messages)
        params_of_each = self._params_of_each(sampling_params, len(conversations))
        parsed = []
        for i, conversation in enumerate(conversations):
            params = params_of_each[i]
            if continue_final_message:
                params_of_each[i] = params_for_rest(params, conversation[-1]["content"])
            prompt = conversation_prompt(conversation, options, template, self.tokenizer, self.config, params)
            parsed.append(prompt)
        set_priorities(parsed, priority)
        self._set_adapters(parsed, lora_request)
        return self._complete(parsed, params_of_each, use_tqdm)

    def stream(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt, and yield its output so far whenever steps have added to it. Several streams
        may be read in turns: each yields its latest output, and steps that another stream ran in between come
        as one. Leaving a stream before its end aborts the request.

        The request is checked when the first output is read. Raises ParameterError if a field or the prompt
        is refused, CheckpointError if the adapter cannot be read, and RuntimeError if the request fails.
        """
        parsed = read_prompt(prompt)
        self._set_adapters([parsed], lora_request)
        request_id = self._add(parsed, sampling_params or self.get_default_sampling_params())
        try:
            outputs = self._run([request_id])
            while True:
                with rare_collections():  # only while the engine works: the caller's code runs at `yield`
                    output = next(outputs, None)
                if output is None:
                    return
                yield output
        finally:
            self._forget([request_id])

    @rare_collections()
    def beam_search(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: Any,
        lora_request: Adapters = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[Any]:
        """Search for the best continuations of each prompt. Returns one BeamSearchOutput per prompt, in
        order. Comes with Extension B.

        `params` is a BeamSearchParams. At most `concurrency_limit` prompts run at once, and no more than the
        cache has room for. The other arguments are those of `generate`.

        Raises ParameterError if a field or a prompt is refused, or if the cache has no room for the beams of
        a prompt: nothing is computed then. Raises RuntimeError if a stream is under way, or if a step fails,
        and AttributeError without Extension B.
        """
        extension = optional_module("beam_search")
        if extension is None:
            raise AttributeError(
                "'LLM' object has no attribute 'beam_search': beam search comes with Extension B"
            )
        parsed = read_prompts(prompts)
        self._set_adapters(parsed, lora_request)
        return extension.beam_search(self.engine, parsed, params, use_tqdm, concurrency_limit)

    def shutdown(self) -> None:
        """Write and send what is left of a trace and of spans, and end the processes of other ranks
        (tensor_parallel_size), if there are any. Generate nothing after this.
        """
        self.engine.shutdown()

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's name of `engine`."""
        return self.engine

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer under Hugging Face's names, with the model's chat template."""
        return ChatTokenizer(self.tokenizer, self.args.tokenizer or self.args.model, self.config)

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics, which are those of a server's /metrics. Raises RuntimeError unless the LLM
        was made with `disable_log_stats=False`.
        """
        if self._metrics is None:
            raise RuntimeError("get_metrics needs LLM(..., disable_log_stats=False)")
        return read_metrics(self._metrics.registry)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache, so that the next prompt is computed as a whole. Returns False, and changes
        nothing, while a stream's request holds memory. With slots there is no prefix cache, and the result is
        True.
        """
        cache = self.engine.scheduler.cache
        return cache.reset_prefix_cache() if isinstance(cache, PagedCache) else True

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of generation_config.json (see `EngineArgs.generation_config`), or
        SamplingParams() if there are none.
        """
        return SamplingParams(**recommended_values(self.args))

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError. Python calls this for an attribute that does not exist; for a method that
        vLLM has, the message says why it is absent here.
        """
        why = f": {ABSENT[name]}" if name in ABSENT else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}")

    def _set_adapters(self, parsed: list[ParsedPrompt], lora_request: Adapters) -> None:
        """Put each prompt's adapter into its options. It is loaded when the request is queued. Raises
        ParameterError if adapters are not enabled, or if their number is not that of the prompts.
        """
        loras = per_prompt("lora_request", lora_request, len(parsed), LoRARequest)
        if self.engine.adapters is None and any(loras):
            raise ParameterError("lora_request", "lora_request needs LLM(..., enable_lora=True)")
        for prompt, lora in zip(parsed, loras, strict=True):
            prompt.options["adapter"] = lora

    def _params_of_each(self, params: Params, num_prompts: int) -> list[SamplingParams]:
        """The parameters of each prompt: `get_default_sampling_params` where `params` has None. Raises
        ParameterError if an entry is no SamplingParams, or if their number is not that of the prompts.
        """
        given = per_prompt("sampling_params", params, num_prompts, SamplingParams)
        if None not in given:
            return given
        default = self.get_default_sampling_params()
        return [default if entry is None else entry for entry in given]

    @rare_collections()
    def _complete(
        self, parsed: list[ParsedPrompt], params_of_each: list[SamplingParams], use_tqdm: UseTqdm
    ) -> list[RequestOutput]:
        """Run the requests until all have finished. Returns their outputs in the prompts' order. Raises
        RuntimeError if one fails.
        """
        progress = Progress(len(parsed), use_tqdm)
        ids: list[str] = []
        finished: dict[str, RequestOutput] = {}
        try:
            for prompt, prompt_params in zip(parsed, params_of_each, strict=True):
                ids.append(self._add(prompt, prompt_params))
            for output in self._run(ids):
                progress.count(output)
                if output.finished:
                    finished[output.request_id] = output
        finally:
            progress.close()
            self._forget(ids)
        return [finished[request_id] for request_id in ids]

    def _add(self, parsed: ParsedPrompt, params: SamplingParams) -> str:
        """Queue a request. Returns the request's id."""
        request_id = str(next(self._request_numbers))
        samples = self.engine.make_requests(request_id, parsed.prompt, params, **parsed.options)
        shown_prompt = parsed.prompt if parsed.text is None else parsed.text
        self.engine.add(request_id, samples, shown_prompt)
        return request_id

    def _run(self, ids: list[str]) -> Iterator[RequestOutput]:
        """Yield outputs of these requests until all have finished. Raises RuntimeError if one fails."""
        unfinished = set(ids)
        while unfinished:
            if self._inbox.keys().isdisjoint(unfinished):
                # A step serves the requests of all streams. Each stream takes its own outputs later.
                for output in self.engine.step():
                    self._inbox[output.request_id] = output
            for request_id in ids:
                latest = self._inbox.pop(request_id, None)
                if latest is None:
                    continue
                if latest.error:
                    raise RuntimeError(f"request {request_id} failed: {latest.error}")
                if latest.finished:
                    unfinished.discard(request_id)
                yield latest

    def _forget(self, ids: list[str]) -> None:
        """Abort the unfinished ones of these requests, and drop outputs that were not read."""
        for request_id in ids:
            self.engine.abort_request(request_id)
            self._inbox.pop(request_id, None)
        # With async_scheduling, a step that was launched before the abort may still have to land. Then the
        # engine has work, though no request is left.
        while self.engine.has_unfinished_requests() and not self.engine.unfinished_request_ids():
            self.engine.step()
