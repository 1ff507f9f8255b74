"""The engine's loop, and the thread it runs in."""
