"""Several answers to one prompt, the same ones every time. In vLLM: another import, and another model."""

from engine import LLM, SamplingParams

prompts = ["Once upon a time", "The little cat"]
sampling_params = SamplingParams(n=3, temperature=0.9, top_p=0.95, seed=7, max_tokens=24)


def main():
    llm = LLM(model="storyteller")
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}")
        for sample in output.outputs:
            print(f"  {sample.index}: {sample.text!r} ({sample.finish_reason})")


if __name__ == "__main__":
    main()
