"""Two prompts in one event loop, words as they come."""

import asyncio

from engine import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

prompts = ["Once upon a time", "One day, a little bird"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=12)


async def tell(engine, number, prompt):
    shown = 0
    async for output in engine.generate(prompt, sampling_params, request_id=str(number)):
        text = output.outputs[0].text
        print(f"{number}: {text[shown:]!r}")
        shown = len(text)


async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="storyteller"))
    await asyncio.gather(*(tell(engine, number, prompt) for number, prompt in enumerate(prompts)))
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
