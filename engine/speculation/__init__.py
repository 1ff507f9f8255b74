"""Drafts: who proposes them, and which of them stand."""
