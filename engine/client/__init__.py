"""Clients of a running server: the dashboard and the chat for a terminal, and a chat page."""
