"""Makes the runner of a model whose attention has extras: windows, soft caps, sinks or scales. Extension C's
wiring.
"""

from engine.cache.extras import ExtrasMemory
from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner, Way
from engine.models.language_model import LanguageModel
from engine.wiring.compose_cache import Memory, Sizes
from engine.wiring.engine_args import EngineArgs
from engine.wiring.runners import graph_way, runs_graphs


def make_extras_runner(
    args: EngineArgs,
    model: LanguageModel,
    memory: Memory,
    sizes: Sizes,
    max_new_tokens: int,
    in_flight: int,
    has_head: bool,
) -> ModelRunner:
    """A runner for one model, whose `attend` takes the extras of each layer. The arguments are as in
    `make_runner` of runners.py. There is no `sum_parts`, because a step here calls the model's own layers,
    and they sum over the ranks. Raises ValueError if the memory has slots and not pages.
    """
    if not isinstance(memory, PageMemory):
        raise ValueError(
            f"kv_cache={args.kv_cache!r}: the attention of this model ({model.config.model_type}) has a "
            "window, a soft cap, sinks or a scale of its own, which only kv_cache='paged' computes"
        )
    extras_memory = _extras_memory(args, memory)
    # Made first, so that a max_num_seqs beyond all memory fails in any case.
    last_tokens = LastTokens(sizes.max_num_seqs, next(model.parameters()).device)
    if in_flight == 1 and not runs_graphs(args):
        # The host knows every token of a step before it submits the step, so none is kept on the device.
        return ModelRunner([EagerWay(model, extras_memory)], memory)
    ways: list[Way] = []
    if runs_graphs(args):
        ways.append(_extras_graph_way(model, memory, sizes, last_tokens, max_new_tokens, in_flight, has_head))
    ways.append(EagerWay(model, extras_memory, upload=last_tokens.upload))
    return ModelRunner(ways, memory, last_tokens=last_tokens)


def _extras_memory(args: EngineArgs, memory: PageMemory) -> ExtrasMemory:
    """`memory`, read by our Triton kernels if `args.attention` names them, and otherwise by PyTorch."""
    if args.attention != "triton":
        return ExtrasMemory(memory)
    from engine.kernels.extras_attention import PagedExtras  # imported here because triton is optional
    from engine.kernels.store_kv import store_kv

    return ExtrasMemory(memory, PagedExtras, store_kv)


def _extras_graph_way(
    model: LanguageModel,
    memory: PageMemory,
    sizes: Sizes,
    last_tokens: LastTokens,
    max_new_tokens: int,
    in_flight: int,
    has_head: bool,
) -> Way:
    """The way that computes steps of few rows as CUDA graphs. The arguments are as in `make_runner`."""
    from engine.execution.extras_step import ExtrasStep  # imported here because triton is optional
    from engine.execution.verifying import num_rows
    from engine.kernels.verify_attend import MAX_NEW_TOKENS

    # One step for all numbers of rows. It stores all rows before any row attends, so a sequence may have
    # several of them (Part 16).
    step = ExtrasStep(model, list(memory.keys), list(memory.values))
    max_rows, max_new = sizes.max_num_seqs, 1
    if max_new_tokens > 1:
        max_rows = num_rows(max_rows, max_new_tokens, sizes.max_num_batched_tokens)
        max_new = MAX_NEW_TOKENS
    vocab_size = model.config.vocab_size if has_head else 0
    return graph_way(
        lambda rows: step, last_tokens, memory, sizes, vocab_size, max_rows, in_flight, max_new=max_new
    )
