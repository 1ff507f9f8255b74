"""Beam searches to compare with, Hugging Face's and a plain one without a cache; a watch over a search."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.cache.paged import PagedCache
from engine.core.beam_search import BeamSearch
from engine.core.llm_engine import LLMEngine
from engine.decoding.beam_search import BeamSearchParams, BeamSearchSequence
from engine.execution.runner import Executor
from engine.requests.batch import Batch

PAD = -7  # no token: Hugging Face fills the rest of shorter answers with it
Found = list[tuple[list[int], float]]  # the answers' tokens and scores, best first


@torch.inference_mode()
def theirs(model: PreTrainedModel, prompt: Sequence[int], params: BeamSearchParams, **settings) -> Found:
    """What Hugging Face finds."""
    ids = torch.tensor([list(prompt)])
    if params.ignore_eos:
        settings |= {"eos_token_id": None}
    if params.beam_width > 1:  # a single beam is greedy search there, which knows no penalty
        settings |= {"length_penalty": float(params.length_penalty)}
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, do_sample=False,
        num_return_sequences=params.beam_width, max_new_tokens=params.max_tokens, pad_token_id=PAD,
        return_dict_in_generate=True, output_scores=True, **settings,
    )  # fmt: skip
    scores = found.sequences_scores.tolist() if params.beam_width > 1 else [float("nan")]
    rows = [row[len(prompt) :] for row in found.sequences.tolist()]
    return [
        (row[: row.index(PAD)] if PAD in row else row, score) for row, score in zip(rows, scores, strict=True)
    ]


def assert_equal(sequences: Sequence[BeamSearchSequence], expected: Found, num_prompt: int) -> None:
    """The same answers, in the same order, with the same scores."""
    ours = [sequence.tokens[num_prompt:] for sequence in sequences]
    assert ours == [tokens for tokens, _ in expected], "other answers, or another order, than Hugging Face's"
    for sequence, (_, score) in zip(sequences, expected, strict=True):
        assert math.isnan(score) or math.isclose(sequence.score, score, rel_tol=1e-4, abs_tol=1e-4), (
            "another score than Hugging Face's"
        )


def plain_search(
    logits_of: Callable[[Sequence[int]], Tensor],
    prompt: Sequence[int],
    params: BeamSearchParams,
    end_ids: frozenset[int],
) -> Found:
    """Beam search as it is told: no cache, every sequence computed from its start, all tokens ranked."""
    width, beams, kept = params.beam_width, [([], 0.0)], []
    for length in range(1, params.max_tokens + 1):
        ranked = []
        for tokens, score in beams:
            logprobs = torch.log_softmax(logits_of([*prompt, *tokens]).float(), dim=-1).tolist()
            ranked += [([*tokens, token], score + logprob) for token, logprob in enumerate(logprobs)]
        ranked.sort(key=lambda entry: -entry[1])
        is_last = length == params.max_tokens
        for tokens, score in ranked[:width]:
            if is_last or tokens[-1] in end_ids:
                kept.append((tokens, score / length**params.length_penalty))
        kept = sorted(kept, key=lambda entry: -entry[1])[:width]
        beams = [(tokens, score) for tokens, score in ranked if tokens[-1] not in end_ids][:width]
        if len(kept) == width and beams[0][1] / length**params.length_penalty <= kept[-1][1]:
            break
    return kept


def search(engine: LLMEngine, prompts: Sequence, params: BeamSearchParams, **options) -> list[list]:
    """The sequences of each prompt."""
    beam_search = BeamSearch(engine, params)
    searches = [beam_search.prepare(str(number), prompt) for number, prompt in enumerate(prompts)]
    return [output.sequences for output in beam_search.run(searches, **options)]


@dataclass
class Watch:
    """An executor around another: keeps, of each step, its record, the block tables and the references."""

    executor: Executor
    cache: PagedCache
    batches: list[Batch] = field(default_factory=list)
    tables: list[dict[str, list[int]]] = field(default_factory=list)  # of each step: sequence -> its blocks
    references: list[list[int]] = field(default_factory=list)  # of each step: of each block

    def submit(self, batch: Batch):
        self.batches.append(batch)
        self.tables.append(
            {name: each.table.blocks.tolist() for name, each in self.cache.allocations.items()}
        )
        self.references.append(list(self.cache.blocks.references))
        return self.executor.submit(batch)

    def on_lost(self, callback) -> None:
        self.executor.on_lost(callback)

    def shutdown(self) -> None:
        self.executor.shutdown()


def watched(engine: LLMEngine) -> Watch:
    """The engine's executor, watched from now on."""
    assert isinstance(engine.scheduler.cache, PagedCache)
    engine.executor = watch = Watch(engine.executor, engine.scheduler.cache)
    return watch
