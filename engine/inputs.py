"""The forms of a prompt, at vLLM's import path. Part 20."""

from engine.wiring.llm_prompts import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
