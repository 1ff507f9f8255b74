"""vLLM's import path of its argument parser: nothing else is in it."""
