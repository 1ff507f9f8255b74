"""What does speculation gain, and where does it lose?

    python -m benchmarks.part16_speculation [--rounds 5] [--tokens 64]      # two or three minutes

storyteller and its draft, fp32 arithmetic, weights packed, one thread, greedy, end of sequence ignored;
prompts are held-out stories' beginnings. All sides of a comparison take turns in one run, and must say the
same: a ratio is the median over the rounds of one round's two times.

1. One stream: Part 3's loop and the engine without drafts, beside 1 to 5 drafts, and a length that adapts.
2. What a step costs: its passes, verification of 1 to 8 rows and the draft model's. Then speed against
   acceptance: three drafts a step, of which a share is spoilt on purpose; and where such a step's time goes.
3. A crowd: 1 to 32 requests at once; in CPU time, the sides in turns step by step.
4. n-grams: on stories, and on requests that are told to repeat themselves (frequency_penalty −1.5).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

import torch

from benchmarks.part16_engines import (
    PROMPTS,
    Fixed,
    Models,
    adaptive,
    load,
    plain,
    speculation_of,
    tell,
    with_draft_model,
    with_ngrams,
)
from benchmarks.record import middle, quartiles, record, show, whole_numbers
from engine.cache.single import CachedForward, SingleCache
from engine.core.llm_engine import LLMEngine
from engine.decoding.greedy import generate
from engine.decoding.params import SamplingParams
from engine.execution.runner import Logits, ModelRunner, Way
from engine.machine.collector import rare_collections
from engine.requests.batch import Batch
from engine.speculation.capability import Tally
from engine.speculation.draft_model import DraftModel

MOST = 5  # drafts at once
CROWDS = (1, 2, 4, 8, 16, 32)
WARM = 3  # rounds of a crowd in which the adaptive length finds out what stands
SPOILT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the drafts
DRAFTS = 3  # where one length is looked at
LOOP, PLAIN, ADAPTIVE = "Part 3's loop", "this engine, no drafts", "adaptive, up to 5"
Side = Callable[[], tuple[list[list[int]], float]]  # -> token ids of each prompt, seconds


class Spoilt:
    """A proposer some of whose drafts are replaced by a token that nobody would say."""

    def __init__(self, proposer, share: float) -> None:
        self.proposer, self.share, self._random = proposer, share, Random(0)
        self.max_positions, self.num_unread = proposer.max_positions, proposer.num_unread

    def propose(self, inputs) -> list[list[int]]:
        made = self.proposer.propose(inputs)
        return [[1 if self._random.random() < self.share else own for own in drafts] for drafts in made]


def one_after_the_other(engine: LLMEngine, prompts: Sequence[str], params: SamplingParams) -> Side:
    def run():
        told = [tell(engine, [prompt], params) for prompt in prompts]
        return [ids for ((ids,), _) in told], sum(seconds for _, seconds in told)

    return run


def part_3(models: Models, prompts: Sequence[str], params: SamplingParams) -> Side:
    def run():
        start, ids = time.perf_counter(), []
        for prompt in prompts:
            forward = CachedForward(models.target)
            told = generate(forward, models.tokenizer, models.target.config, prompt, params)
            ids.append(list(told.outputs[0].token_ids))
        return ids, time.perf_counter() - start

    return run


def take_turns(sides: dict[str, Side], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """side -> seconds of each round; before them, `warm` rounds are not counted. All must say the same."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    said = None
    for _ in range(warm + rounds):
        for name, run in sides.items():
            ids, took = run()
            assert said is None or ids == said, f"{name} says something else"
            said = ids
            seconds[name].append(took)
    return {name: values[warm:] for name, values in seconds.items()}


def step_by_step(
    engines: dict[str, LLMEngine], prompts: Sequence[str], params: SamplingParams
) -> dict[str, float]:
    """Seconds of CPU that each engine takes to answer all prompts at once. They take turns, a step each:
    a busy moment is everybody's.
    """
    seconds, said = dict.fromkeys(engines, 0.0), {name: {} for name in engines}
    for engine in engines.values():
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
    while any(engine.has_unfinished_requests() for engine in engines.values()):
        for name, engine in engines.items():
            start = time.process_time()
            outputs = engine.step() if engine.has_unfinished_requests() else []
            seconds[name] += time.process_time() - start
            said[name] |= {o.request_id: list(o.outputs[0].token_ids) for o in outputs if o.finished}
    for name, own in said.items():
        assert own == said[next(iter(said))], f"{name} says something else"
    return seconds


def faster(seconds: dict[str, list[float]], side: str, other: str) -> list[float]:
    """How many times as fast `side` is as `other`, by round."""
    return [b / a for a, b in zip(seconds[side], seconds[other], strict=True)]


def alpha_of(tally: Tally, k: int) -> float:
    """How often a draft stood whose predecessors did."""
    return tally.accepted / max(1, tally.accepted + tally.drafts - tally.accepted_at[k - 1])


def one_stream(models: Models, tokens: int, rounds: int) -> tuple[dict, dict]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engines = {f"{k} drafts": with_draft_model(models, Fixed(k)) for k in range(1, MOST + 1)}
    engines |= {ADAPTIVE: adaptive(with_draft_model, models, MOST)}
    sides = {LOOP: part_3(models, PROMPTS, params)}
    for name, engine in ({PLAIN: plain(models)} | engines).items():
        sides[name] = one_after_the_other(engine, PROMPTS, params)
    seconds = take_turns(sides, rounds)
    count = tokens * len(PROMPTS)
    best = min((LOOP, PLAIN), key=lambda name: statistics.median(seconds[name]))
    rows, gains = [], {}
    for name in sides:
        tally = speculation_of(engines[name]).tally if name in engines else None
        # Each step brings one token and the accepted drafts.
        told = count * (rounds + 1)
        per_step = told / (told - tally.accepted) if tally else 1.0
        speed = count / statistics.median(seconds[name])
        in_rounds = faster(seconds, name, best)
        gains[name] = statistics.median(in_rounds)
        rows.append([name, speed, per_step, middle(in_rounds)])
    fixed = [gains[f"{k} drafts"] for k in range(1, MOST + 1)]
    longest = speculation_of(engines[f"{MOST} drafts"]).tally
    reached = [longest.drafts, *longest.accepted_at]  # how often the i-th draft was judged
    figures = {
        "fastest_plain": best,
        "tokens_per_second": {name: speed for name, speed, *_ in rows},
        "tokens_per_step": {name: per_step for name, _, per_step, _ in rows},
        "gain": gains,
        "best_fixed": {"drafts": fixed.index(max(fixed)) + 1, "gain": max(fixed)},
        "adaptive_gain": gains[ADAPTIVE],
        "best_gain": max(*fixed, gains[ADAPTIVE]),
        "plain_ms": statistics.median(seconds[PLAIN]) / count * 1e3,
        "accepted_at": [at / longest.drafts for at in longest.accepted_at],
        "accepted_if_reached": [b / max(a, 1) for a, b in pairwise(reached)],
        "alpha": alpha_of(speculation_of(engines[f"{DRAFTS} drafts"]).tally, DRAFTS),
    }
    columns = ["one stream", "tokens/s", "tokens per step", "× the fastest without drafts"]
    return figures, {"columns": columns, "rows": rows}


@torch.inference_mode()
def step_costs(models: Models) -> dict:
    """Milliseconds of a step's passes, at a context of 100 tokens: verification of 1 to 8 rows, and a pass of
    the draft model. They follow one another as in a step, k drafts and then k + 1 rows, and steps of a length
    follow one another: a pass is quicker if its weights were used just before.
    """

    def pass_of(model, rows: int) -> Callable[[], object]:
        cache = SingleCache(model.config, 128)
        cache.length, ids, positions = 100, torch.arange(300, 300 + rows), torch.arange(100, 100 + rows)
        return lambda: model.logits(model(ids, positions, cache.attend)).argmax(-1)

    passes = {f"rows_{n}": pass_of(models.target, n) for n in range(1, 9)}
    passes["draft"] = pass_of(models.draft, 1)
    times: dict[str, list[float]] = {name: [] for name in passes}
    for k in [*range(8)] * 10:
        for name in [*["draft"] * k, f"rows_{k + 1}"] * 20:
            start = time.perf_counter()
            passes[name]()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


class TimedWay:
    """A runner's way to compute a pass, whose seconds are added up."""

    def __init__(self, way: Way) -> None:
        self.way, self.fits, self.seconds = way, way.fits, 0.0

    def __call__(self, batch: Batch) -> Logits:
        start = time.perf_counter()
        logits = self.way(batch)
        self.seconds += time.perf_counter() - start
        return logits


def inside_a_step(models: Models, tokens: int) -> dict[str, float]:
    """Where the milliseconds of a step go whose drafts never stand. Passes are the engine's, over pages.
    Medians over steps that verify drafts and propose the next.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine = with_draft_model(models, Fixed(DRAFTS))
    speculation = speculation_of(engine)
    draft_model, proposing = speculation.proposer, 0.0
    assert isinstance(draft_model, DraftModel)
    runner, reader = engine.executor, draft_model.runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(reader, ModelRunner)
    target, draft = TimedWay(runner.ways[0]), TimedWay(reader.ways[0])
    runner.ways, reader.ways = [target], [draft]
    spoilt = Spoilt(draft_model, 1.0)
    propose = spoilt.propose

    def timed(inputs):
        nonlocal proposing
        start = time.perf_counter()
        made = propose(inputs)
        proposing += time.perf_counter() - start
        return made

    spoilt.propose, speculation.proposer = timed, spoilt
    tell(engine, PROMPTS[:1], params)  # to warm up
    steps: list[dict[str, float]] = []
    for prompt in PROMPTS:
        engine.add_request("0", prompt, params)
        while engine.has_unfinished_requests():
            target.seconds = draft.seconds = proposing = 0.0
            verified, start = speculation.tally.proposed, time.perf_counter()
            engine.step()
            took = time.perf_counter() - start
            if speculation.tally.proposed - verified == DRAFTS and proposing:
                steps.append(
                    {
                        "target": target.seconds,
                        "drafts": draft.seconds,
                        "around_drafts": proposing - draft.seconds,
                        "rest": took - target.seconds - proposing,
                    }
                )
    return {name: statistics.median(step[name] for step in steps) * 1e3 for name in steps[0]}


def against_acceptance(models: Models, tokens: int, rounds: int, costs: dict) -> tuple[dict, list[dict]]:
    """What a plain step takes beside the target's pass, and one with three drafts, none of which stands,
    beside the passes of both; then, of three drafts a step, some spoilt: acceptance, and speed over the
    engine without drafts.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts, engines = PROMPTS[:4], {}
    for share in SPOILT:
        engine = engines[share] = with_draft_model(models, Fixed(DRAFTS))
        speculation = speculation_of(engine)
        speculation.proposer = Spoilt(speculation.proposer, share)
    sides = {name: one_after_the_other(engine, prompts, params) for name, engine in engines.items()}
    seconds = take_turns({PLAIN: one_after_the_other(plain(models), prompts, params)} | sides, rounds)
    points = [
        {
            "spoilt": share,
            "alpha": alpha_of(speculation_of(engine).tally, DRAFTS),
            "gain": statistics.median(faster(seconds, share, PLAIN)),
            "rounds": quartiles(faster(seconds, share, PLAIN)),
        }
        for share, engine in engines.items()
    ]
    count = tokens * len(prompts)  # and as many steps, where no draft stands
    plain_ms, none_stands = (statistics.median(seconds[name]) / count * 1e3 for name in (PLAIN, SPOILT[-1]))
    passes = costs[f"rows_{DRAFTS + 1}"] + DRAFTS * costs["draft"]
    fixed = {"fixed": plain_ms - costs["rows_1"], "fixed_with_drafts": none_stands - passes}
    return fixed | {"plain_step": plain_ms, "step_with_drafts": none_stands}, points


def by_the_formula(figures: dict) -> dict[int, float]:
    """By the number of drafts: the tokens per second that the article's formula says. How often a draft
    stands, and the fixed cost of a step, are taken from one draft a step; the passes' times from the table.
    """
    ms, one = figures["ms"], figures["one"]
    tokens = one["tokens_per_step"]["1 drafts"]
    alpha = tokens - 1
    fixed = 1000 * tokens / one["tokens_per_second"]["1 drafts"] - ms["rows_2"] - ms["draft"]
    says = {}
    for k in range(1, MOST + 1):
        step = fixed + ms[f"rows_{k + 1}"] + k * ms["draft"]
        says[k] = 1000 * sum(alpha**j for j in range(k + 1)) / step
    return says


def crowds(models: Models, tokens: int, rounds: int) -> tuple[dict, dict]:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rows, figures = [], {}
    for B in CROWDS:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(B)]
        finding_out = adaptive(with_draft_model, models, MOST, B)
        engines = {
            "plain": plain(models, B),
            "fixed": with_draft_model(models, Fixed(DRAFTS), B),
            "adaptive": finding_out,
        }
        told = [step_by_step(engines, prompts, params) for _ in range(WARM + rounds)][WARM:]
        seconds = {name: [one[name] for one in told] for name in engines}
        tally, told = speculation_of(finding_out).tally, B * tokens * (rounds + WARM)
        gains = [faster(seconds, name, "plain") for name in ("fixed", "adaptive")]
        speed = B * tokens / statistics.median(seconds["plain"])
        rows.append([B, speed, *map(middle, gains), tally.proposed / (told - tally.accepted)])
        fixed, adapting = map(statistics.median, gains)
        figures[f"b{B}"] = {"plain": speed, "fixed": fixed, "adaptive": adapting}
    columns = [
        "requests at once",
        "no drafts, tokens/s",
        f"{DRAFTS} drafts, ×",
        "adaptive, ×",
        "drafts per request and step, adaptive",
    ]
    return figures, {"columns": columns, "rows": rows}


def ngrams(models: Models, tokens: int, rounds: int) -> tuple[dict, dict]:
    rows, figures = [], {}
    for key, text, penalty in (("stories", "stories", 0.0), ("repeats", "text that repeats itself", -1.5)):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, frequency_penalty=penalty)
        engines = {
            "4 n-gram drafts": with_ngrams(models, Fixed(4)),
            "n-grams, adaptive, up to 4": adaptive(with_ngrams, models, 4),
        }
        prompts = PROMPTS[:6]
        composed = {PLAIN: plain(models)} | engines
        seconds = take_turns(
            {name: one_after_the_other(engine, prompts, params) for name, engine in composed.items()},
            rounds,
        )
        gains = []
        for name, engine in engines.items():
            tally, told = speculation_of(engine).tally, tokens * len(prompts) * (rounds + 1)
            share = tally.accepted / max(tally.proposed, 1)
            in_rounds = faster(seconds, name, PLAIN)
            gains.append(statistics.median(in_rounds))
            rows.append([text, name, share, told / (told - tally.accepted), middle(in_rounds)])
        figures[key] = dict(zip(("fixed", "adaptive"), gains, strict=True))
    return figures, {
        "columns": ["text", "drafts", "accepted", "tokens per step", "× no drafts"],
        "rows": rows,
    }


def main() -> None:
    options = whole_numbers(__doc__.split("\n")[0], rounds=5, tokens=64)
    torch.set_num_threads(1)
    models = load()
    figures, tables = {}, {}
    figures["one"], tables["one"] = one_stream(models, options.tokens, options.rounds)
    costs = step_costs(models)
    fixed, figures["acceptance"] = against_acceptance(models, options.tokens, options.rounds, costs)
    figures["ms"] = costs | fixed
    figures["inside"] = inside_a_step(models, options.tokens)
    many = load(rows=16)
    figures["crowd"], tables["crowd"] = crowds(many, options.tokens // 2, options.rounds)
    figures["ngram"], tables["ngram"] = ngrams(models, options.tokens, options.rounds)
    columns = ["rows", *range(1, 9), "draft, 1 row"]
    tables["costs"] = {"columns": list(map(str, columns)), "rows": [["ms", *costs.values()]]}
    workload = {
        "models": ["storyteller", "storyteller-draft"], "prompts": len(PROMPTS), "new_tokens": options.tokens,
        "rounds": options.rounds, "arithmetic": "float32", "temperature": 0, "drafts_looked_at": DRAFTS,
    }  # fmt: skip
    question = "What does speculation gain, and where does it lose?"
    show(record("part16_speculation", question, workload, figures, tables), tables)


if __name__ == "__main__":
    with rare_collections():
        main()
