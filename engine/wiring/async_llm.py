"""`AsyncLLMEngine`, with vLLM's names: generates text for the coroutines of an event loop. Part 20.

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=50), request_id="1"):
        print(output.outputs[0].text)
    engine.shutdown()

A reader that is slower than the engine gets the latest output and misses the outputs before it.

`AsyncLLMEngine` does not change Python's garbage collector, because the event loop belongs to another
program, which may tune the collector itself. `ruvon serve` owns its process and changes two things: Python
looks for cycles less often (`rare_collections` in engine/machine/collector.py), and never among the objects
that were loaded (`gc.freeze`). `LLM` uses `rare_collections` during a call. A program that only serves may
wrap its event loop in `rare_collections()`.
"""

import math
from collections.abc import AsyncIterator, Mapping

from engine.core.engine_thread import EngineThread
from engine.core.mailbox import EngineError
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.lora.request import LoRARequest
from engine.wiring.compose import build_engine, load_adapters_on_demand
from engine.wiring.engine_args import EngineArgs
from engine.wiring.llm_prompts import PromptInput, read_prompt
from engine.wiring.llm_tokenizer import ChatTokenizer

AsyncEngineArgs = EngineArgs


class AsyncLLMEngine:
    """An engine that runs in a thread of its own: Part 6's EngineThread."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model and start the thread.

        Raises CheckpointError if a model or tokenizer cannot be loaded, ValueError if an option cannot be
        met on this machine.
        """
        self.args, self.engine = args, build_engine(args)
        load_adapters_on_demand(self.engine)
        self._thread = EngineThread(self.engine, str(args.model), max_preparing=math.inf)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLMEngine":
        """As the constructor, under vLLM's name."""
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Continue one prompt, and yield its output as it grows. Each output holds all text and tokens so
        far; the last output has `finished` set.

        `request_id` must differ from those of unfinished requests. A lower `priority` is served first.
        `lora_request` needs `enable_lora`; None uses the base model. An adapter that is not loaded yet is
        read from its files between two steps, and all other requests wait meanwhile. `trace_headers` are
        W3C's traceparent and tracestate, of the span to which the request's span belongs (it needs
        `otlp_traces_endpoint`). Closing the iterator before the last output aborts the request.

        Raises ParameterError if a field or the prompt is refused, CheckpointError if the adapter cannot be
        read, and EngineError if a step fails or the engine was shut down.
        """
        parsed = read_prompt(prompt)
        options = parsed.options | {"priority": priority, "trace_headers": trace_headers}
        if lora_request is not None:
            if self.engine.adapters is None:
                raise ParameterError("lora_request", "lora_request needs EngineArgs(enable_lora=True)")
            options["adapter"] = lora_request
        outputs = await self._thread.generate(parsed.prompt, sampling_params, request_id, **options)
        try:
            async for output in outputs:
                output.prompt = parsed.text
                yield output
        finally:
            await outputs.aclose()

    async def abort(self, request_id: str) -> None:
        """End a request. Its reader gets a last output with the finish reason "abort"."""
        await self._thread.abort(request_id)

    async def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer under Hugging Face's names, with the model's chat template."""
        name = self.args.tokenizer or self.args.model
        return ChatTokenizer(self.engine.tokenizer, name, self.engine.config)

    async def check_health(self) -> None:
        """Raises EngineError if the engine's thread has ended, so that no request is answered any more."""
        if not self.is_running:
            raise EngineError("the engine is not running")

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread answers requests."""
        return self._thread.health()

    def shutdown(self) -> None:
        """Abort all unfinished requests, stop the thread, write and send what is left of a trace and of
        spans, and end the processes of other ranks.
        """
        self._thread.stop()
        self.engine.shutdown()
