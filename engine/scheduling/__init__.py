"""Chooses which requests run in the next step, and writes the record of the step."""
