"""Replaces linear layers by others, and computes packed prompts."""
