"""Text to ids and back. Knows no request."""
