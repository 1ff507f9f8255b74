"""An engine from `EngineArgs`: the one place that knows every part. Part 20's wiring.

Promises an engine whose every option has its effect, or a CheckpointError or ValueError that says why not.
The way there: `EngineArgs` checks the options (engine_args.py), `load_devices` makes all that computes
(devices.py; its memory: compose_cache.py), and `build_engine` adds what runs on the host.
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
from engine.lora.on_demand import OnDemand
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
    """Load the models and put an engine together. Raises CheckpointError or ValueError."""
    recording = _open_recording(args.record) if args.record is not None else None
    devices = load_devices(args)
    args, slots, sizes = devices.args, devices.slots, devices.sizes
    # 1. Executors: the runners, or recorders around them.
    executor: Executor = devices.runner
    draft_executor: Executor | None = devices.draft
    if recording is not None:
        recording.about(about(args))
        executor = RecordedExecutor(executor, recording, "model")
        if draft_executor is not None:
            draft_executor = RecordedExecutor(draft_executor, recording, "draft")
        if slots:
            slots.on_assign = lambda slot, adapter: recording.adapter(slot, adapter.folder)
    # 2. The scheduler, with a plan of the model's memory.
    scheduler = ElasticScheduler(
        plan_of(args, devices.memory),
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        adapter_slots=slots,
        select_rows=scored_rows,
    )
    # 3. Capabilities: what is called around each step.
    engine_class = AheadEngine if args.async_scheduling else LLMEngine
    capabilities: list[Capability] = []
    if devices.speculative:
        step_times = devices.speculative.step_times or _measured_step_times(
            devices, devices.speculative, engine_class
        )
        speculation = _speculation(devices, devices.speculative, scheduler, draft_executor, step_times)
        capabilities.append(speculation)
    # 4. The engine.
    supports = SUPPORTS | {"priority"}
    if args.kv_cache == "paged":
        supports |= {"cache_salt"}
    if slots:
        supports |= {"adapter"}
    return engine_class(
        devices.tokenizer,
        devices.config,
        scheduler,
        executor,
        Listeners(listeners),
        recover=scheduler.recover,
        supports=supports,
        max_model_len=sizes.max_model_len,
        adapters=AdapterManager(slots, scheduler) if slots else None,
        capabilities=capabilities,
    )


def load_adapters_on_demand(engine: LLMEngine) -> None:
    """From now on the requests of this engine ask for an adapter with a LoRARequest, not by a name."""
    if isinstance(engine.adapters, AdapterManager):
        engine.adapters = OnDemand(engine.adapters, engine.config)


def _open_recording(path: str | Path) -> Recording:
    """A recording, opened before a model is loaded. Raises ValueError: no file can be written there."""
    try:
        return Recording(path)
    except OSError as error:
        raise ValueError(f"record={str(path)!r}: {error.strerror}") from None


def _speculation(
    devices: Devices,
    config: SpeculativeConfig,
    scheduler: Scheduler,
    draft_executor: Executor | None,
    step_times: StepTimes,
) -> Speculation:
    """Speculation for one scheduler, with proposals by a draft model, or by lookup in the text itself.
    `step_times`: the seconds that steps with drafts take.
    """
    proposer: Proposer
    if draft_executor is not None and devices.draft_config is not None:
        max_positions = devices.draft_config.max_positions
        proposer = DraftModel(draft_executor, scheduler.cache, max_positions)
    else:
        proposer = NgramProposer(
            partial(lookup, max_n=config.prompt_lookup_max, min_n=config.prompt_lookup_min)
        )
    return Speculation(proposer, scheduler, DraftLengths(config.num_speculative_tokens, step_times))


def _measured_step_times(
    devices: Devices, config: SpeculativeConfig, engine_class: type[LLMEngine]
) -> StepTimes:
    """The seconds that steps with drafts take here, measured in a trial engine over the same memory."""
    sizes, args = devices.sizes, devices.args
    if args.kv_cache == "paged":  # no copies of blocks: the memory counts them, and must still be at 0
        args = replace(args, preemption_mode="recompute", swap_space=0)
    scheduler = ContinuousScheduler(
        plan_of(args, devices.memory), sizes.max_num_seqs, sizes.max_num_batched_tokens
    )
    speculation = _speculation(devices, config, scheduler, devices.draft, ALWAYS_DRAFT)
    trial_engine = engine_class(
        devices.tokenizer,
        devices.config,
        scheduler,
        devices.runner,
        max_model_len=sizes.max_model_len,
        capabilities=[speculation],
    )
    return measure(trial_engine, speculation, sizes.max_num_seqs)
