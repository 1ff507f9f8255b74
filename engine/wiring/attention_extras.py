"""Makes the runner of a model whose attention has extras: windows, soft caps, sinks or scales. Extension C's
wiring.
"""

from engine.cache.extras import ExtrasMemory
from engine.cache.memory import PageMemory
from engine.execution.last_tokens import LastTokens
from engine.execution.runner import EagerWay, ModelRunner
from engine.models.language_model import LanguageModel
from engine.wiring.compose_cache import Memory, Sizes
from engine.wiring.engine_args import EngineArgs
from engine.wiring.runners import decode_graphs, runs_graphs


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
    `make_runner` of runners.py. Its `sum_parts` is not needed: a step here calls the model's own layers, and
    they sum over the ranks. Raises ValueError if the memory has slots and not pages.
    """
    if not isinstance(memory, PageMemory):
        raise ValueError(
            f"kv_cache={args.kv_cache!r}: the attention of this model ({model.config.model_type}) has a "
            "window, a soft cap, sinks or a scale of its own, which only kv_cache='paged' computes"
        )
    device = next(model.parameters()).device
    last_tokens = LastTokens(sizes.max_num_seqs, device)
    if args.attention != "triton":
        extras_memory = ExtrasMemory(memory)
        if in_flight == 1:  # the host knows every token of a step before it submits the step
            return ModelRunner([EagerWay(model, extras_memory)], memory)
        eager = EagerWay(model, extras_memory, upload=last_tokens.upload)
        return ModelRunner([eager], memory, last_tokens=last_tokens)
    from engine.kernels.extras_attention import PagedExtras  # imported here because triton is optional
    from engine.kernels.store_kv import store_kv

    eager = EagerWay(model, ExtrasMemory(memory, PagedExtras, store_kv), upload=last_tokens.upload)
    if not runs_graphs(args):
        return ModelRunner([eager], memory, last_tokens=last_tokens)
    from engine.execution.extras_step import ExtrasStep
    from engine.execution.graphs import GraphWay
    from engine.execution.verifying import num_rows
    from engine.kernels.verify_attend import MAX_NEW_TOKENS

    max_rows, max_new = sizes.max_num_seqs, 1
    if max_new_tokens > 1:
        max_rows = num_rows(max_rows, max_new_tokens, sizes.max_num_batched_tokens)
        max_new = MAX_NEW_TOKENS
    V = model.config.vocab_size if has_head else 0
    # One step for all numbers of rows. It stores all rows before any row attends, so a sequence may have
    # several of them (Part 16).
    step = ExtrasStep(model, list(memory.keys), list(memory.values))
    graphs = decode_graphs(lambda rows: step, last_tokens, memory, sizes, V, max_rows, in_flight)
    way = GraphWay(graphs, V, max_new=max_new)
    return ModelRunner([way, eager], memory, last_tokens=last_tokens)
