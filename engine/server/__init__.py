"""The HTTP server: routes, admission control, and the server's process."""
