"""Triton. Takes tensors, and models for their weights; imports machine, attention, models, layers at most."""
