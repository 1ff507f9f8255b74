"""Drafts: how they are proposed, how many, and which are accepted."""
