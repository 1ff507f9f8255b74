"""Makes the runner of a model: by which ways its steps are computed. Part 20's wiring.

A step runs in the first way that fits: as a CUDA graph if it has few rows, otherwise kernel by kernel.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner, Way
from engine.models.language_model import LanguageModel
from engine.wiring.compose_cache import Memory, Sizes
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import ANY_MODEL, wiring_of

if TYPE_CHECKING:
    from engine.execution.graphs import GraphWay, StepOf


def make_runner(
    args: EngineArgs,
    model: LanguageModel,
    memory: Memory,
    sizes: Sizes,
    max_new_tokens: int,
    in_flight: int,
    sum_parts: Callable[[torch.Tensor], torch.Tensor] | None = None,
    has_head: bool = True,
) -> ModelRunner:
    """A runner for one model. Raises ValueError as `make_extras_runner` does (Extension C).

    `max_new_tokens` is the most tokens that a sequence has in a step once its prompt is computed.
    `in_flight` is the number of steps that may be submitted before the first one's result is read.
    `sum_parts` sums over the ranks, in place, if several devices share the model (Extension A); None if the
    model is whole. All ranks record the same graphs, in the same order. `has_head`: whether the model has its
    output layer, which only the rank that chooses tokens keeps.
    """
    if model.config.attention_extras:
        return wiring_of(ANY_MODEL).make_extras_runner(
            args, model, memory, sizes, max_new_tokens, in_flight, has_head
        )
    # Made first, so that a max_num_seqs beyond all memory fails in any case.
    last_tokens = LastTokens(sizes.max_num_seqs, next(model.parameters()).device)
    if in_flight == 1 and not runs_graphs(args):
        # The host knows every token of a step before it submits the step, so none is kept on the device.
        return ModelRunner([EagerWay(model, memory)], memory)
    if not runs_graphs(args):
        eager = EagerWay(model, memory, upload=last_tokens.upload)
        return ModelRunner([eager], memory, last_tokens=last_tokens)

    from engine.execution.steps import fastest_steps, verifying_steps  # imported here: triton is optional
    from engine.execution.verifying import num_rows
    from engine.kernels.llama_prompts import prompt_forward
    from engine.kernels.verify_attend import MAX_NEW_TOKENS

    assert isinstance(memory, PageMemory)  # otherwise `runs_graphs` is false
    vocab_size = model.config.vocab_size if has_head else 0
    max_rows = sizes.max_num_seqs  # one row for each sequence
    step_of = fastest_steps(model, memory, max_rows, sum_parts)
    ways: list[Way] = [graph_way(step_of, last_tokens, memory, sizes, vocab_size, max_rows, in_flight)]
    if max_new_tokens > 1:
        max_rows = num_rows(sizes.max_num_seqs, max_new_tokens, sizes.max_num_batched_tokens)
        step_of = verifying_steps(model, memory, max_rows, sum_parts)
        verifying = graph_way(
            step_of, last_tokens, memory, sizes, vocab_size, max_rows, in_flight, max_new=MAX_NEW_TOKENS
        )
        ways.append(verifying)
    ways.append(EagerWay(model, memory, prompt_forward(model, sum_parts), last_tokens.upload))
    return ModelRunner(ways, memory, last_tokens=last_tokens)


def graph_way(
    step_of: "StepOf",
    last_tokens: LastTokens,
    memory: PageMemory,
    sizes: Sizes,
    vocab_size: int,
    max_rows: int,
    in_flight: int,
    max_new: int = 1,
) -> "GraphWay":
    """The way that computes steps of at most `max_rows` rows as CUDA graphs, which are recorded here if the
    memory is on a GPU. `step_of` gives the step that computes a number of rows. `vocab_size` is 0 if the
    steps give no logits. `max_new` is the most new tokens of a sequence. `in_flight` is as in `make_runner`.
    """
    from engine.execution.graphs import DecodeGraphs, GraphWay

    graphs = DecodeGraphs(
        step_of,
        last_tokens,
        vocab_size=vocab_size,
        max_rows=max_rows,
        width=-(-sizes.max_model_len // memory.block_size),  # blocks of the longest sequence, rounded up
        capture=last_tokens.chosen.is_cuda,
        in_flight=max(2, in_flight),  # a step that fails once its pass is queued is not waited for
    )
    return GraphWay(graphs, vocab_size, max_new)


def runs_graphs(args: EngineArgs) -> bool:
    """Whether steps of few rows run as CUDA graphs. Graphs need the Triton kernels, which read pages."""
    return args.attention == "triton" and args.kv_cache == "paged" and not args.enforce_eager
