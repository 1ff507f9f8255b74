"""A GPU's memory really runs out inside a step, and the engine lives on: `pytest -m gpu`."""

import gc
from collections.abc import Callable

import torch

from engine import LLM, SamplingParams
from tests.part08.on_a_gpu import full_precision, on_a_gpu  # noqa: F401

pytestmark = on_a_gpu
# More steps than it takes to find full size again, from a step of one token.
AGAIN = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def with_a_third_of_the_memory(run: Callable[[], list]) -> tuple[list, list]:
    """What `run` gives with all the memory there is, and with a third of what its steps took then. This
    process alone may not have more: others' tests run on the same GPU.
    """
    run()  # what stays from a first step, such as a workspace of a library, is not a step's
    settle()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first = run()
    took = torch.cuda.max_memory_allocated() - before
    settle()
    limit = torch.cuda.memory_reserved() + took + 2**25
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    taken = all_but(took // 3)
    print(f"steps took {took:,} bytes; {took // 3:,} are left")
    try:
        return first, run()
    finally:
        del taken
        torch.cuda.set_per_process_memory_fraction(1.0)
        settle()


def all_but(spared: int) -> list[torch.Tensor]:
    """All memory that this process may have, also what PyTorch keeps between tensors, but for so many bytes,
    and 16 MiB in the segments that PyTorch has for small tensors alone.
    """
    spare = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (spared, *[2**20] * 16)]
    taken, size = [], 2**36
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    del spare
    return taken


def watch(llm: LLM) -> list[tuple[type, str]]:
    """The errors of failed steps, as they come. The errors themselves would hold the steps' tensors."""
    errors, recover = [], llm.engine.recover

    def noted(step, error):
        errors.append((type(error), str(error)))
        return recover(step, error)

    llm.engine.recover = noted
    return errors


def assert_it_ran_out_and_lives_on(llm: LLM, errors: list[tuple[type, str]], full: tuple[int, int]) -> None:
    scheduler = llm.engine.scheduler
    assert any(issubclass(kind, torch.OutOfMemoryError) for kind, _ in errors), "memory never ran out"
    assert scheduler.num_out_of_memory == len(errors), f"a step failed for another reason: {errors}"
    assert scheduler.cache.usage().num_sequences == 0
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], AGAIN, use_tqdm=False)
    now = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    assert now == full, "with memory there again, steps are as large as ever"


def test_prompts_are_read_in_smaller_steps_and_nobody_notices():
    """57,600 tokens of prompts in steps of 32,768, in memory that holds a third of such a step."""
    full = 64, 32768
    llm = LLM(
        "storyteller", device="cuda", dtype="float32", max_num_seqs=full[0], max_num_batched_tokens=full[1],
        kv_cache_memory_bytes=64 * 1024 * 12288, enable_prefix_caching=False,
    )  # fmt: skip
    errors = watch(llm)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [(7 * i + j * j) % 4096 for j in range(900)]} for i in range(64)]

    def run() -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)  # raises if one fails
        return [output.outputs[0].token_ids for output in outputs]

    plenty, scarce = with_a_third_of_the_memory(run)
    assert scarce == plenty, "a smaller step gives the same tokens"
    assert_it_ran_out_and_lives_on(llm, errors, full)


def test_when_sampling_runs_out_some_wait_and_all_come_to_their_end():
    """The steps run as graphs, with memory of their own; fences sort 50,257 numbers for each of 128 rows."""
    full = 128, 512
    llm = LLM(
        "gpt2", load_format="dummy", device="cuda", dtype="bfloat16", max_num_seqs=full[0],
        max_num_batched_tokens=full[1], kv_cache_memory_bytes=2**30,
    )  # fmt: skip
    errors = watch(llm)
    params = SamplingParams(temperature=1, top_p=0.9, top_k=1000, seed=1, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [i, i + 1, i + 2]} for i in range(128)]

    def run() -> list[tuple[int, str]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [(len(output.outputs[0].token_ids), output.outputs[0].finish_reason) for output in outputs]

    plenty, scarce = with_a_third_of_the_memory(run)
    assert scarce == plenty == [(16, "length")] * 128
    assert_it_ran_out_and_lives_on(llm, errors, full)
