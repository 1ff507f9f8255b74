"""A KV cache: its plan on the host (which memory belongs to which sequence), and its memory on the device."""
