"""Builds an engine from `EngineArgs`. Part 20's wiring.

Every option takes effect, or an error says why it cannot. An engine is built in three stages: `EngineArgs`
checks the options (engine_args.py), `load_devices` loads the models and makes their memory and runners
(devices.py, compose_devices.py and compose_cache.py), and `build_engine` adds what runs on the host: the
scheduler, speculation and adapters.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from engine.core.ahead import AheadEngine
from engine.core.interfaces import Capability
from engine.core.llm_engine import LLMEngine
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
from engine.wiring.compose_devices import Devices
from engine.wiring.devices import load_devices
from engine.wiring.engine_args import EngineArgs
from engine.wiring.extensions import BRING_CAPABILITIES, Contribution, is_here, wiring_of
from engine.wiring.generation_config import with_eos_tokens
from engine.wiring.replay import recording_header
from engine.wiring.watchers import Watchers


def build_engine(args: EngineArgs, listeners: Sequence[Listener] = ()) -> LLMEngine:
    """Load the models and build an engine. `listeners` are told what happens to requests and steps.

    Raises CheckpointError if a model, tokenizer or draft model cannot be loaded, ValueError if an option
    cannot be met on this machine.
    """
    recording = _open_recording(args.record) if args.record is not None else None
    watchers = Watchers(args)
    with ExitStack() as on_failure:
        on_failure.callback(watchers.close)
        devices = load_devices(args)
        on_failure.callback(devices.executor.shutdown)
        engine = _compose(devices, recording, listeners, watchers)
        on_failure.pop_all()  # the engine's shutdown does both from now on
    return engine


def load_adapters_on_demand(engine: LLMEngine) -> None:
    """Have this engine's requests ask for an adapter with a LoRARequest instead of a name. An engine without
    adapters stays as it is.
    """
    if isinstance(engine.adapters, AdapterManager):
        engine.adapters = OnDemand(engine.adapters, engine.config)


def _compose(
    devices: Devices, recording: Recording | None, listeners: Sequence[Listener], watchers: Watchers
) -> LLMEngine:
    """The engine, made of the loaded models. With a `recording`, all its steps are written there. Raises
    ValueError if an option cannot be met.
    """
    args, slots, sizes = devices.args, devices.slots, devices.sizes
    # 1. Executors, which compute the steps of the model and of the draft model.
    executor = devices.executor
    draft_executor: Executor | None = devices.draft_runner
    if recording is not None:
        executor, draft_executor = _recorded(devices, recording)
    # 2. The scheduler, with a plan of the model's memory for keys and values. A draft model may read blocks
    #    that lie behind the model's window, so with one the plan keeps them.
    window = None if devices.draft_config else devices.config.window
    scheduler = ElasticScheduler(
        plan_of(args, devices.memory, window),
        sizes.max_num_seqs,
        sizes.max_num_batched_tokens,
        adapter_slots=slots,
        select_rows=scored_rows,
    )
    # 3. Capabilities: objects that the engine calls around each step.
    engine_class = AheadEngine if args.async_scheduling else LLMEngine
    capabilities: list[Capability] = []
    speculative = devices.speculative
    if speculative is not None:
        step_times = speculative.step_times or _measured_step_times(devices, speculative, engine_class)
        capabilities.append(_speculation(devices, speculative, scheduler, draft_executor, step_times))
    extensions: list[Contribution] = []
    for letter in BRING_CAPABILITIES:
        if is_here(letter):
            extensions.append(wiring_of(letter).contribution(devices))
    capabilities += [extension.capability for extension in extensions]
    # 4. The engine.
    engine = engine_class(
        devices.tokenizer,
        with_eos_tokens(devices.config, args),
        scheduler,
        executor,
        Listeners([*listeners, *watchers.listeners(args, scheduler)]),
        recover=scheduler.recover,
        supports=_supported_fields(devices, extensions),
        max_model_len=sizes.max_model_len,
        seed=args.seed,
        adapters=AdapterManager(slots, scheduler) if slots else None,
        capabilities=capabilities,
        preparations=[extension.preparation for extension in extensions],
    )
    executor.on_lost(engine.report_lost)
    engine.on_shutdown.append(watchers.close)
    return engine


def _open_recording(path: str | Path) -> Recording:
    """The recording at `path`, opened for writing. Raises ValueError if no file can be written there."""
    try:
        return Recording(path)
    except OSError as error:
        raise ValueError(f"record={str(path)!r}: {error.strerror}") from None


def _recorded(devices: Devices, recording: Recording) -> tuple[Executor, Executor | None]:
    """The executors of the model and of the draft model (None without one), which write each step into
    `recording`. Also writes the recording's first line now, and later a line for each adapter that gets a
    slot.
    """
    recording.write_about(recording_header(devices.args))
    if devices.slots:
        devices.slots.on_assign.append(lambda slot, adapter: recording.write_adapter(slot, adapter.folder))
    executor = RecordedExecutor(devices.executor, recording, "model")
    draft_executor = None
    if devices.draft_runner is not None:
        draft_executor = RecordedExecutor(devices.draft_runner, recording, "draft")
    return executor, draft_executor


def _supported_fields(devices: Devices, extensions: Sequence[Contribution]) -> frozenset[str]:
    """Names of what a request may ask of this engine: fields of SamplingParams that later parts than Part 2
    bring, and options of `LLMEngine.make_requests`.
    """
    fields = SUPPORTS | {"priority"}
    if devices.args.kv_cache == "paged":
        fields |= {"cache_salt"}
    if devices.slots:
        fields |= {"adapter"}
    for extension in extensions:
        fields |= extension.supports
    return fields


def _speculation(
    devices: Devices,
    config: SpeculativeConfig,
    scheduler: Scheduler,
    draft_executor: Executor | None,
    step_times: StepTimes,
) -> Speculation:
    """Speculation for one scheduler. A draft model proposes the tokens if `draft_executor` is given;
    otherwise they are looked up in the request's own text. `step_times` has the seconds that steps with
    drafts take.
    """
    proposer: Proposer
    if draft_executor is not None and devices.draft_config is not None:
        max_positions = devices.draft_config.max_positions
        proposer = DraftModel(draft_executor, scheduler.cache, max_positions)
    else:
        longest, shortest = config.lookup_lengths
        proposer = NgramProposer(partial(lookup, max_n=longest, min_n=shortest))
    return Speculation(proposer, scheduler, DraftLengths(config.num_speculative_tokens, step_times))


def _measured_step_times(
    devices: Devices, config: SpeculativeConfig, engine_class: type[LLMEngine]
) -> StepTimes:
    """The seconds that steps with drafts take on this machine, measured with a trial engine that uses the
    same runners and memory.
    """
    sizes, args = devices.sizes, devices.args
    if args.kv_cache == "paged":
        # The trial may not copy blocks. The memory remembers the number of its last copy, and would skip the
        # copies of the engine's plan, whose numbers also begin at 0.
        args = replace(args, preemption_mode="recompute", swap_space=0)
    scheduler = ContinuousScheduler(
        plan_of(args, devices.memory), sizes.max_num_seqs, sizes.max_num_batched_tokens
    )
    speculation = _speculation(devices, config, scheduler, devices.draft_runner, ALWAYS_DRAFT)
    trial_engine = engine_class(
        devices.tokenizer,
        devices.config,
        scheduler,
        devices.executor,
        max_model_len=sizes.max_model_len,
        capabilities=[speculation],
    )
    return measure(trial_engine, speculation, sizes.max_num_seqs, sizes.max_num_batched_tokens)
