"""What an engine gets of structured output: a capability, and who compiles. Extension B's wiring.

No module imports this one: engine/wiring/extensions.py finds it by its name.
"""

from engine.structured.capability import Structured
from engine.structured.compiler import Compiler, StructuredOutputsConfig
from engine.wiring.devices import Devices
from engine.wiring.extensions import Brought
from engine.wiring.generation_config import with_its_eos


def brought(devices: Devices) -> Brought:
    """The capability for an engine of these devices. Raises ValueError for a wrong option."""
    config = StructuredOutputsConfig.from_dict(devices.args.structured_outputs_config or {})
    eos_ids = with_its_eos(devices.config, devices.args).eos_token_ids
    structured = Structured(Compiler(devices.tokenizer, eos_ids, config), eos_ids)
    return Brought(structured, structured, frozenset({"structured_outputs"}))
