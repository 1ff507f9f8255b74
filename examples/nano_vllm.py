"""What nano-vllm's README begins with. There: `from nanovllm import …`, and the path of a model."""

from engine import LLM, SamplingParams


def main():
    llm = LLM("storyteller", enforce_eager=True, tensor_parallel_size=1)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)
    prompts = ["Once upon a time, there was a small"]
    outputs = llm.generate(prompts, sampling_params)
    print(outputs[0]["text"])


if __name__ == "__main__":
    main()
