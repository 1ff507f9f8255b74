"""Triton kernels over tensors or a model's weights. Imports machine, attention, models and layers at most."""
