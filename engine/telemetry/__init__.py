"""Listeners that measure an engine: metrics, history, cost."""
