"""A program beside the engine that shows it at work: a server and several people who ask it, or one story."""
