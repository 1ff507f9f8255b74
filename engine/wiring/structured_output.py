"""Adds structured output to an engine: a capability, and a compiler for what outputs must fit. Extension B's
wiring.

No module imports this one: engine/wiring/extensions.py finds it by its name.
"""

from engine.structured.capability import StructuredOutput
from engine.structured.compiler import Compiler, StructuredOutputsConfig
from engine.wiring.compose_devices import Devices
from engine.wiring.extensions import Contribution
from engine.wiring.generation_config import with_eos_tokens


def contribution(devices: Devices) -> Contribution:
    """The capability for an engine of these devices, and the function that compiles what a request's output
    must fit. Raises ValueError if the option `structured_outputs_config` is refused.
    """
    config = StructuredOutputsConfig.from_dict(devices.args.structured_outputs_config or {})
    eos_ids = with_eos_tokens(devices.config, devices.args).eos_token_ids
    structured = StructuredOutput(Compiler(devices.tokenizer, eos_ids, config), eos_ids)
    return Contribution(
        capability=structured, preparation=structured, supports=frozenset({"structured_outputs"})
    )
