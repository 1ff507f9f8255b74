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
from engine.cache.memory import PageMemory
from engine.core.ahead import AheadEngine
from engine.core.llm_engine import LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.decoding.params import SamplingParams
from engine.decoding.sampling_state import SamplingState
from engine.execution.graphs import DecodeGraphs, GraphWay
from engine.execution.graphs import fastest_steps as plain_steps
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.execution.verifying import verifying_steps
from engine.kernels.verify_attend import MAX_NEW_TOKENS
from engine.machine.collector import rare_collections
from engine.models.loader import load_model
from engine.requests.request import Request
from engine.scheduling.batching import make_batch
from engine.scheduling.continuous import ContinuousScheduler
from engine.speculation.capability import Speculation
from engine.speculation.draft_model import DraftModel, DraftSampler
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.speculation.rejection_sampler import DraftProbs, RejectionSampler
from engine.text.tokenizer import Tokenizer
from engine.wiring.attention_kernel import attention_kernel

CONTEXT, MOST, P = 512, 8, 16
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
DRAFT_LAYERS = 2
TINY = {
    "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 4096, "eos_token_id": 0, "n_positions": 64,
    "activation_function": "relu",  # the model's own forward pass: the interpreter is slow
}  # fmt: skip


class Fixed(DraftLengths):
    """So many drafts, whatever they bring."""

    drafts = 0

    def __init__(self):
        super().__init__(MOST, ALWAYS_DRAFT)

    def choose(self, request_ids, caps):
        return [min(self.drafts, cap) for cap in caps]


def memory_of(model, sequences: int, length: int) -> PageMemory:
    parameter = next(model.parameters())
    how = parameter.device, parameter.dtype
    kernel = attention_kernel("triton", model.config.head_dim, *how)
    from engine.kernels.paged_attention import PagedAttention
    from engine.kernels.paged_prefill import PagedPrefill

    kernels = {"decode": PagedAttention, "prefill": PagedPrefill}
    return PageMemory(model.config, sequences * -(-length // P), P, *how, kernel, **kernels)


def graphs_of(
    model, memory, last, make_steps, sizes: list[int], length: int, max_new=1, in_flight=2
) -> GraphWay:
    """Graphs of these sizes alone: the ladder has more, and each costs time to compile."""
    V, step = model.config.vocab_size, make_steps(model, memory, sizes[-1])
    width = -(-length // P)
    graphs = DecodeGraphs(step, last, V, sizes[-1], width, capture=False, in_flight=in_flight)
    graphs.sizes = sizes
    if last.chosen.is_cuda:
        graphs._capture()
    return GraphWay(graphs, V, max_new)


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


def replay_ms(way: GraphWay, size: int, repeats: int) -> float | None:
    """The graph alone, over the numbers of the last pass."""
    if size not in way.graphs._graphs:
        return None
    replay, _ = way.graphs._graphs[size]
    ends = [torch.cuda.Event(enable_timing=True) for _ in "ab"]
    replay()
    ends[0].record()
    for _ in range(repeats):
        replay()
    ends[1].record()
    torch.cuda.synchronize()
    return ends[0].elapsed_time(ends[1]) / repeats


def passes(way: GraphWay, plan, sequences: int, news: range, context: int, repeats: int) -> list[dict]:
    """A pass of `new` tokens of each sequence behind a context."""
    requests = []
    for i in range(sequences):
        ids, params = [7 + i] * (context + MOST), SamplingParams()
        request = Request(str(i), str(i), ids, len(ids), params, None, SamplingState(params, ids, [], i))
        plan.admit(request)
        plan.reserve(request, len(ids))
        request.num_computed_tokens = context
        requests.append(request)
    found = []
    for new in news:
        for request in requests:
            request.token_ids = [9] * context + [11]
            request.num_prompt_tokens = context + 1  # each row's successor is wanted, as behind drafts
            request.draft_ids = [12 + i for i in range(new - 1)]
        batch = make_batch([(request, new) for request in requests], plan)

        @torch.inference_mode()
        def whole(batch=batch):
            return way(batch).values.argmax(-1).tolist()

        ms = median_ms(whole, repeats)
        size = next(size for size in way.graphs.sizes if size >= batch.num_tokens)
        found.append({"tokens": new, "ms": ms, "replay_ms": replay_ms(way, size, repeats)})
    for request in requests:
        plan.release(request)
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
    memory, second = (memory_of(model, people, length) for model in (target, draft))
    place = next(target.parameters()).device
    last, draft_last = LastTokens(people, place), LastTokens(people, place)
    plain = graphs_of(target, memory, last, plain_steps, sorted(set(options.sequences)), length)
    sizes, few = (sizes_for(options.sequences, range(1, new + 1)) for new in (most, 2))
    verifying = graphs_of(target, memory, last, verifying_steps, sizes, length, MAX_NEW_TOKENS)
    reading = graphs_of(
        draft, second, draft_last, verifying_steps, few, length, MAX_NEW_TOKENS, in_flight=MOST + 1
    )
    print(f"loaded and captured: {time.perf_counter() - began:.0f} s", flush=True)

    def runner_of(model, memory, last, *ways) -> ModelRunner:
        return ModelRunner([*ways, EagerWay(model, memory, upload=last.upload)], memory, last_tokens=last)

    def engine_of(kind: type, runner: ModelRunner, scheduler, *capabilities) -> LLMEngine:
        return kind(
            tokenizer, target.config, scheduler, runner, supports=SUPPORTS, max_model_len=length,
            capabilities=capabilities,
        )  # fmt: skip

    def scheduler() -> ContinuousScheduler:
        return ContinuousScheduler(memory.plan(enable_prefix_caching=False), people, 8192)

    draft_probs, lengths, queues = DraftProbs(), Fixed(), scheduler()
    runner, reader = (
        runner_of(target, memory, last, verifying),
        runner_of(draft, second, draft_last, reading),
    )
    runner.select, reader.select = RejectionSampler(draft_probs), DraftSampler(draft_probs)
    proposer = DraftModel(reader, queues.cache, draft.config.max_positions)
    speculation = Speculation(proposer, queues, lengths)
    speculating = engine_of(LLMEngine, runner, queues, speculation)
    ahead = engine_of(AheadEngine, runner_of(target, memory, last, plain), scheduler())

    figures, tables = {}, {}
    for S in options.sequences:
        plan = memory.plan(enable_prefix_caching=False)
        verify = passes(verifying, plan, S, range(1, most + 1), context, repeats)
        draft_pass = passes(reading, plan, S, range(1, 3), context, repeats)
        base = step_ms(ahead, S, context, repeats)
        steps = []
        for lengths.drafts in range(most):
            steps.append(step_ms(speculating, S, context, repeats))
        tally = speculation.tally
        found = {"verify": verify, "draft": draft_pass, "plain_step_ms": base, "step_ms": steps}
        figures[f"s{S}"] = found | {"proposed": tally.proposed, "accepted": tally.accepted}
        print(f"{S}: {figures[f's{S}']}", f"{time.perf_counter() - began:.0f} s", flush=True)
        rows = []
        for n, ms in enumerate(steps):
            needed = ms / base
            speed = [sum(rate**j for j in range(n + 1)) * base / ms for rate in RATES]
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
    with rare_collections():
        main()
