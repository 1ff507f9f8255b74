"""A crowd for a server, and what it saw."""
