"""The embedded models, a folder each, found by scanning."""
