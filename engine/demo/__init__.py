"""The demo of the whole engine: a server with several simulated users, or one story."""
