"""`AsyncLLMEngine` with vLLM's names: a prompt in, its output as it grows, in an event loop. Part 20.

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller"))
    async for output in engine.generate("Once upon a time", SamplingParams(max_tokens=50), request_id="1"):
        print(output.outputs[0].text)
    engine.shutdown()

A slow reader gets the latest output, and misses those before it.

It leaves Python's garbage collector as it finds it: the event loop is another program's, which may tune the
collector itself. `ruvon serve` has the process to itself: there, Python looks for cycles less often all the
time (`rare_collections` in engine/machine/collector.py), and never among what was loaded (`gc.freeze`). `LLM`
does the first of the two during a call. A program that only serves may wrap its loop in `rare_collections()`.
"""

from collections.abc import AsyncIterator

from engine.core.engine_thread import EngineThread
from engine.decoding.outputs import RequestOutput
from engine.decoding.params import ParameterError, SamplingParams
from engine.lora.request import LoRARequest
from engine.text.tokenizer import Tokenizer
from engine.wiring.compose import build_engine, load_adapters_on_demand
from engine.wiring.engine_args import EngineArgs
from engine.wiring.llm_prompts import PromptInput, read_prompt

AsyncEngineArgs = EngineArgs


class AsyncLLMEngine:
    """The engine that EngineArgs describe, in Part 6's EngineThread."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model and start the thread. Raises CheckpointError or ValueError."""
        self.args, self.engine = args, build_engine(args)
        load_adapters_on_demand(self.engine)
        self._thread = EngineThread(self.engine, str(args.model))
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "AsyncLLMEngine":
        return cls(engine_args)

    async def generate(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Its outputs, each with everything so far. A reader that leaves before the last one aborts the
        request. An adapter that is not there yet is read when the request is queued, between two steps:
        everybody waits for that.

        Raises ParameterError for a field or a prompt that is refused, CheckpointError for an adapter, and
        EngineError for a failed step, or after `shutdown`.
        """
        parsed = read_prompt(prompt)
        options = parsed.options | {"priority": priority}
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
        """End a request: its reader gets a last output with the finish reason "abort"."""
        await self._thread.abort(request_id)

    async def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def is_running(self) -> bool:
        return self._thread.health()

    def shutdown(self) -> None:
        """Abort unfinished requests, and stop the thread."""
        self._thread.stop()
