"""Adapters: read, laid into slots, mixed within one batch."""
