"""Quantized models: weights in 8 or 4 bits, as linear layers and embeddings."""
