"""The embedded models. Each folder here is one; engine/models/checkpoint.py finds them by scanning."""
