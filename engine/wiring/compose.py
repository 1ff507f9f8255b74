"""An engine from `EngineArgs`: every part put together. Part 20's wiring, the one place that knows them all.

Promises an engine whose every option has its effect, or a CheckpointError or ValueError that says why not.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.core.ahead import AheadEngine
from engine.core.llm_engine import Capability, LLMEngine
from engine.decoding.logprobs import SUPPORTS
from engine.execution.recording import RecordedExecutor, Recording
from engine.execution.runner import Executor
from engine.lora.manager import AdapterManager
from engine.requests.listeners import Listener, Listeners
from engine.scheduling.continuous import ContinuousScheduler
from engine.scheduling.elastic import ElasticScheduler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scored_rows import scored_rows
from engine.speculation.capability import NgramProposer, Proposer, Speculation
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.lengths import DraftLengths
from engine.speculation.measuring import ALWAYS_DRAFT, measure
from engine.speculation.ngram import lookup
from engine.speculation.step_times import StepTimes
from engine.wiring.compose_cache import plan_of
from engine.wiring.devices import Devices, load_devices
from engine.wiring.engine_args import EngineArgs
from engine.wiring.replay import about


def build_engine(args: EngineArgs, listeners: Sequence[Listener] = ()) -> LLMEngine:
    """Load the model and compose the parts. Raises CheckpointError or ValueError."""
    recording = _recording(args.record) if args.record is not None else None
    devices = load_devices(args)
    args, slots, sizes = devices.args, devices.slots, devices.sizes
    # 1. What computes; all it does is written down, if that is asked.
    executor: Executor = devices.runner
    reader: Executor | None = devices.draft
    if recording is not None:
        recording.about(about(args))
        executor = RecordedExecutor(executor, recording, "model")
        reader = reader and RecordedExecutor(reader, recording, "draft")
        if slots:
            slots.on_put = lambda slot, adapter: recording.adapter(slot, adapter.folder)
    # 2. Who runs next.
    scheduler = ElasticScheduler(
        plan_of(args, devices.memory),
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        adapter_slots=slots.slot_of if slots else None,
        select_rows=scored_rows,
    )
    # 3. What is asked around each step.
    capabilities: list[Capability] = []
    engine = AheadEngine if args.async_scheduling else LLMEngine
    if how := devices.speculative:
        times = how.step_times or _measured(devices, how, engine)
        capabilities.append(_speculation(devices, how, scheduler, reader, times))
    supports = SUPPORTS | {"priority"} | ({"cache_salt"} if args.kv_cache == "paged" else set())
    return engine(
        devices.tokenizer,
        devices.config,
        scheduler,
        executor,
        Listeners(listeners),
        recover=scheduler.recover,
        supports=supports | ({"adapter"} if slots else set()),
        max_model_len=sizes.max_model_len,
        adapters=AdapterManager(slots, scheduler) if slots else (),
        capabilities=capabilities,
    )


def _speculation(
    devices: Devices, how: SpeculativeConfig, scheduler: Scheduler, reader: Executor | None, times: StepTimes
) -> Speculation:
    """Who proposes: a draft model, or the text itself."""
    proposer: Proposer = NgramProposer(
        partial(lookup, longest=how.prompt_lookup_max, shortest=how.prompt_lookup_min)
    )
    if reader is not None and devices.draft_config is not None:
        longest = devices.draft_config.max_positions
        proposer = DraftModel(reader, scheduler.cache, longest)
    return Speculation(proposer, scheduler, DraftLengths(how.num_speculative_tokens, times))


def _measured(devices: Devices, how: SpeculativeConfig, engine: type[LLMEngine]) -> StepTimes:
    """How long steps with drafts take here, in an engine of this class that has a plan of its own."""
    sizes, args = devices.sizes, devices.args
    if args.kv_cache == "paged":  # then no blocks are copied
        args = replace(args, preemption_mode="recompute", swap_space=0)
    plan = plan_of(args, devices.memory)
    scheduler = ContinuousScheduler(plan, sizes.max_num_seqs, sizes.max_num_batched_tokens)
    speculation = _speculation(devices, how, scheduler, devices.draft, ALWAYS_DRAFT)
    trial = engine(
        devices.tokenizer,
        devices.config,
        scheduler,
        devices.runner,
        max_model_len=sizes.max_model_len,
        capabilities=[speculation],
    )
    return measure(trial, speculation, sizes.max_num_seqs)


def _recording(path: str | Path) -> Recording:
    """Opened before a model is loaded. Raises ValueError: no file can be written there."""
    try:
        return Recording(path)
    except OSError as error:
        raise ValueError(f"record={str(path)!r}: {error.strerror}") from None
