"""Drafts: who proposes them, how many, and which are accepted."""
