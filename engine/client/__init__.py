"""Programs beside the engine that ask a server: the terminal's board and chat, a page."""
