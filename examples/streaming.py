"""Two prompts in one event loop, words as they come.

In vLLM: `AsyncLLMEngine.from_engine_args(...)` makes the engine, and its `generate` needs no `await`.
"""

import asyncio

from engine import LLM, AsyncLLMEngine, SamplingParams

prompts = ["Once upon a time", "One day, a little bird"]
sampling_params = SamplingParams(temperature=0.0, max_tokens=12)


async def tell(engine, number, prompt):
    shown = 0
    async for output in await engine.generate(prompt, sampling_params, request_id=str(number)):
        text = output.outputs[0].text
        print(f"{number}: {text[shown:]!r}")
        shown = len(text)


async def main():
    async with AsyncLLMEngine(LLM(model="storyteller").engine, "storyteller") as engine:
        await asyncio.gather(*(tell(engine, number, prompt) for number, prompt in enumerate(prompts)))


if __name__ == "__main__":
    asyncio.run(main())
