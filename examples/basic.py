"""Prompts in, texts out. In vLLM: `from vllm import LLM, SamplingParams`, and another model."""

from engine import LLM, SamplingParams

prompts = [
    "Once upon a time",
    "One day, a little bird",
    "Lily found a shiny",
    "The sun was warm and",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main():
    llm = LLM(model="storyteller")
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Output: {output.outputs[0].text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
