"""What Extension C brings to the wiring. `engine/wiring/extensions.py` finds this module by its name."""

from engine.attention.extras import causal
from engine.wiring.attention_extras import runner

__all__ = ["causal", "runner"]
