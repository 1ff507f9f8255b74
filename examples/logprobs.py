"""What the model thought of each token. In vLLM: another import, and another model."""

from engine import LLM, SamplingParams

sampling_params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=1)


def main():
    llm = LLM(model="storyteller")
    (output,) = llm.generate(["Tom had a big red"], sampling_params)
    for token_id, candidates in zip(output.prompt_token_ids, output.prompt_logprobs):
        own = candidates and candidates[token_id]  # nothing comes before the first token
        print(f"read  {own.decoded_token!r}: {own.logprob:.2f}, rank {own.rank}" if own else "read  …")
    sample = output.outputs[0]
    for token_id, candidates in zip(sample.token_ids, sample.logprobs):
        likeliest = ", ".join(f"{one.decoded_token!r} {one.logprob:.2f}" for one in candidates.values())
        print(f"wrote {candidates[token_id].decoded_token!r} among {likeliest}")
    print(f"altogether {sample.cumulative_logprob:.2f}")


if __name__ == "__main__":
    main()
