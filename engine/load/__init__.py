"""A load generator for servers with OpenAI's API: what it sends, when, and what it measures."""
