"""Does a token's log probability depend on who else is in the step?

    python -m benchmarks.part10_neighbours      # counts digits, and times nothing

One request, greedy, with its prompt's and its output's log probabilities: alone, beside four others, and with
its prompt in chunks of five tokens. And the same request alone a second time.
"""

import torch

from benchmarks.part10_surprise import MODEL, STORY
from benchmarks.record import record, show
from engine.cache.slots import SlotMemory
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.scores import logprobs_of
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.scored_rows import scored_rows
from engine.text.tokenizer import Tokenizer

PROMPT = "Once upon a time, there was a little dog named Max. Max had"
TOKENS, SEATS, WHOLE, CHUNK = 20, 5, 256, 5  # output tokens; seats; budgets of a step


def logprobs_of_one(tokenizer: Tokenizer, model, neighbours: int, budget: int) -> list[float]:
    """The log probabilities of PROMPT's tokens and of TOKENS more, beside `neighbours` other requests."""
    memory = SlotMemory(model.config, SEATS)
    scheduler = ContinuousScheduler(memory.plan(), SEATS, budget, select_rows=scored_rows)
    runner = ModelRunner([EagerWay(model, memory)], memory, scores=logprobs_of(tokenizer, model.logits))
    engine = LLMEngine(tokenizer, model.config, scheduler, runner, supports=SUPPORTS)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, prompt_logprobs=0, logprobs=1)
    engine.add_request("one", PROMPT, params)
    for i in range(neighbours):
        engine.add_request(str(i), STORY[i:], params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "one":
                one = output
    scores = [*one.prompt_logprobs[1:], *one.outputs[0].logprobs]
    return [own.logprob for own in scores]


def main() -> None:
    torch.set_num_threads(1)
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL)
    alone = logprobs_of_one(tokenizer, model, 0, WHOLE)
    others = {
        "alone, a second time": logprobs_of_one(tokenizer, model, 0, WHOLE),
        "beside four others": logprobs_of_one(tokenizer, model, SEATS - 1, WHOLE),
        f"its prompt in chunks of {CHUNK} tokens": logprobs_of_one(tokenizer, model, 0, CHUNK),
    }
    rows = []
    for name, logprobs in others.items():
        differences = [abs(a - b) for a, b in zip(alone, logprobs, strict=True)]
        rows.append(
            [name, len(alone), differences.count(0.0), f"{max(differences):.1e}" if max(differences) else "0"]
        )
    columns = ["the same request", "log probabilities", "equal to the last bit", "largest difference"]
    tables = {"neighbours": {"columns": columns, "rows": rows}}
    figures = {
        name: {"equal": row[2], "largest": float(row[3])} for name, row in zip(others, rows, strict=True)
    }
    workload = {"model": MODEL, "prompt": PROMPT, "output_tokens": TOKENS, "dtype": "float32"}
    show(record("part10_neighbours", __doc__.splitlines()[0], workload, figures, tables), tables)


if __name__ == "__main__":
    main()
