"""Executes steps on one device: a batch in, tokens out."""
