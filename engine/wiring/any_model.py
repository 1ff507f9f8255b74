"""Extension C's functions for the rest of the wiring. `engine/wiring/extensions.py` finds this module by its
name, so no other file needs to import it.
"""

from engine.attention.extras import causal
from engine.wiring.attention_extras import make_extras_runner

__all__ = ["causal", "make_extras_runner"]
