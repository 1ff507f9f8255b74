"""The series: one folder per part, and the tool that lists, shows, runs, tests and cuts them.

`part.toml` in each folder is the one source of truth about that part. The tool (`python -m parts`) knows
nothing about the engine: it copies files, and cuts out the bodies of the functions that a manifest names as
exercises.
"""
