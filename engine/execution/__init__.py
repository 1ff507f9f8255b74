"""A batch in, tokens out, on one device."""
