"""The command `ruvon`."""
