"""Listeners that count: metrics, history, cost."""
