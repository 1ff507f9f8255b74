"""What does a step with drafts cost on a GPU, beside a plain step, and what acceptance pays for it?

    python -m benchmarks.part16_gpu                       # one H200
    TRITON_INTERPRET=1 python -m benchmarks.part16_gpu --tiny    # tries it on a CPU; nothing is recorded

GPT-2 XL's shape and a draft model of two of its layers, random bf16 weights, CUDA graphs, a context of 512
tokens, greedy, 1 and 8 sequences, pages of 16 tokens. Random weights show no acceptance. So it measures the
cost alone: of a pass over 1 to 8 tokens of each sequence (replayed, and with its numbers written and its
tokens read), and of an engine's whole step with 0 to 7 drafts. From these follows what acceptance would pay:
`rate` is the probability that a draft stands if those before it do.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.record import OUT, RESULTS, record, show
from benchmarks.shapes import GPT2_XL, dummy_folder
from engine.ahead import AheadEngine, AheadExecutor, LastTokens
from engine.attention.kernels import attention_kernel
from engine.batch import make_batch
from engine.cache.paged import PagedCache
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import SamplingState
from engine.graphs import GraphForward
from engine.llm_engine import LLMEngine
from engine.models.loader import load_model
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.request import Request
from engine.scoring import ScoringExecutor
from engine.speculation.draft_model import DraftModel
from engine.speculation.executor import SpeculativeExecutor
from engine.speculation.graphs import RowsForward
from engine.speculation.lengths import Lengths, expected_tokens
from engine.speculation.paired import PairedCache
from engine.speculation.verify import Verifier
from engine.tokenizer import Tokenizer

CONTEXT, MOST, P = 512, 8, 16
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_LAYERS = 2
TINY = {
    "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 4096, "eos_token_id": 0, "n_positions": 64,
    "activation_function": "relu",  # the model's own forward pass: the interpreter is slow
}  # fmt: skip


class Fixed(Lengths):
    """So many drafts, whatever they bring."""

    drafts = 0

    def asks(self, people):
        return True

    def choose(self, request_ids, caps):
        return [min(self.drafts, cap) for cap in caps]


def cache_of(model, sequences: int, length: int) -> PagedCache:
    parameter = next(model.parameters())
    how = parameter.device, parameter.dtype
    kernel = attention_kernel("triton", model.config.head_dim, *how)
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill

    kernels = {"decode": PagedAttention, "prefill": PagedPrefill, "enable_prefix_caching": False}
    return PagedCache(model.config, sequences * -(-length // P), P, *how, kernel, **kernels)


def rows_forward(
    model, cache: PagedCache, sizes: list[int], length: int, chains: bool = False
) -> RowsForward:
    """Graphs of these sizes alone: the ladder has more, and each costs time to compile."""
    made = RowsForward(model, cache, sizes[-1], length, capture=False, chains=chains)
    made.graphs.sizes = sizes
    if made.device.type == "cuda":
        made.graphs._capture()
    return made


def sizes_for(sequences: list[int], new: range) -> list[int]:
    small = {1, 2, 4}
    return sorted({n if n in small else -(-n // 8) * 8 for n in (s * k for s in sequences for k in new)})


def median_ms(run, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[len(times) // 4 :])


def replay_ms(forward: RowsForward, size: int, repeats: int) -> float | None:
    """The graph alone, over the numbers of the last pass."""
    if size not in forward.graphs._graphs:
        return None
    replay, _ = forward.graphs._graphs[size]
    ends = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
    replay()
    ends[0].record()
    for _ in range(repeats):
        replay()
    ends[1].record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) / repeats


def passes(forward: RowsForward, sequences: int, news: range, context: int, repeats: int) -> list[dict]:
    """A pass of `new` tokens of each sequence behind a context."""
    cache, requests = forward.cache, []
    for i in range(sequences):
        ids, params = [7 + i] * (context + MOST), SamplingParams()
        one = Request(str(i), str(i), ids, len(ids), params, None, SamplingState(params, ids, [], i))
        cache.begin(one)
        cache.reserve(one, len(ids))
        one.num_computed_tokens = context
        requests.append(one)
    found = []
    for new in news:
        for one in requests:
            one.token_ids = [9] * context + [11 + i for i in range(new)]
            one.num_prompt_tokens = context + 1  # each row's successor is wanted, as behind drafts
            one.draft_ids, one.token_ids = one.token_ids[context + 1 :], one.token_ids[: context + 1]
        batch = make_batch([(one, new) for one in requests])
        whole = median_ms(lambda batch=batch: forward(batch).argmax(-1).tolist(), repeats)
        size = next(size for size in forward.graphs.sizes if size >= batch.num_tokens)
        found.append({"tokens": new, "ms": whole, "replay_ms": replay_ms(forward, size, repeats)})
    for one in requests:
        cache.release(one)
    return found


def step_ms(engine: LLMEngine, sequences: int, context: int, steps: int) -> float:
    """The median of an engine's steps, in the middle of which a sequence has about `context` tokens."""
    params = SamplingParams(temperature=0, max_tokens=MOST * (steps + 8), ignore_eos=True)
    names = [f"s{i}" for i in range(sequences)]
    for i, name in enumerate(names):
        ids = [(i * 31 + 7 * j) % 4000 + 1 for j in range(context - steps)]
        engine.add_request(name, ids, params)
    while len(engine.step()) < sequences:
        pass
    for _ in range(5):
        engine.step()
    found = median_ms(engine.step, steps)
    for name in names:
        engine.abort_request(name)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a shape that a CPU can try")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    began = time.perf_counter()
    shape, device, dtype, context, repeats = GPT2_XL, "cuda", "bfloat16", CONTEXT, options.repeats
    most = MOST
    if options.tiny:
        shape, device, dtype, context, repeats, most = GPT2_XL | TINY, "cpu", "float32", 24, 2, 3
    length = min(shape["n_positions"], context + MOST * (repeats + 8))
    folder = dummy_folder(Path(tempfile.mkdtemp()), shape)
    small = dummy_folder(Path(tempfile.mkdtemp()), shape | {"n_layer": DRAFT_LAYERS})
    target, draft = (load_model(one, device, dtype, "dummy") for one in (folder, small))
    tokenizer, people = Tokenizer.from_pretrained(folder), max(options.sequences)
    cache = PairedCache(*(cache_of(model, people, length) for model in (target, draft)))
    reading = rows_forward(draft, cache.draft, sizes_for(options.sequences, range(1, 3)), length, chains=True)
    verifying = rows_forward(target, cache.target, sizes_for(options.sequences, range(1, most + 1)), length)
    print(f"loaded and captured: {time.perf_counter() - began:.0f} s", flush=True)

    proposer, lengths = DraftModel(draft, cache, reading), Fixed(MOST)
    inner = ScoringExecutor(verifying, tokenizer, Verifier(proposer.probs))

    def engine_of(kind: type, memory, executor) -> LLMEngine:
        scheduler = ContinuousScheduler(memory, people, 8192)
        return kind(tokenizer, target.config, scheduler, executor, supports=SUPPORTS, max_model_len=length)

    speculating = engine_of(LLMEngine, cache, SpeculativeExecutor(inner, cache, proposer, lengths))
    last = LastTokens(people, verifying.device)
    plain = GraphForward(target, cache.target, last, length, capture=False)
    plain.graphs.sizes = sorted(set(options.sequences))
    if device == "cuda":
        plain.graphs._capture()
    executor = AheadExecutor(plain, tokenizer, last, sampler=plain.choose)
    ahead = engine_of(AheadEngine, cache.target, executor)

    figures, tables = {}, {}
    for S in options.sequences:
        verify = passes(verifying, S, range(1, most + 1), context, repeats)
        draft_pass = passes(reading, S, range(1, 3), context, repeats)
        base = step_ms(ahead, S, context, repeats)
        steps = []
        for lengths.drafts in range(most):
            steps.append(step_ms(speculating, S, context, repeats))
        tally = speculating.executor.tally
        found = {"verify": verify, "draft": draft_pass, "plain_step_ms": base, "step_ms": steps}
        figures[f"s{S}"] = found | {"proposed": tally.proposed, "accepted": tally.accepted}
        print(f"{S}: {figures[f's{S}']}", f"{time.perf_counter() - began:.0f} s", flush=True)
        rows = []
        for n, ms in enumerate(steps):
            needed = ms / base
            speed = [expected_tokens(rate, n) * base / ms for rate in RATES]
            rows.append([n, verify[n]["replay_ms"], verify[n]["ms"], ms, needed, *speed])
        columns = ["drafts", "graph, ms", "pass, ms", "engine's step, ms", "tokens a step that pay"]
        columns += [f"speed at rate {rate}" for rate in RATES]
        tables[f"sequences_{S}"] = {"columns": columns, "rows": rows}
    workload = {"shape": shape, "draft_layers": DRAFT_LAYERS, "context": context, "dtype": dtype}
    question = __doc__.split("\n")[0]
    to = OUT if options.tiny else RESULTS
    show(record("part16_gpu", question, workload | {"repeats": repeats}, figures, tables, folder=to), tables)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
