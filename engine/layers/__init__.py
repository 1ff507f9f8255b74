"""Linear layers swapped for others, and packed prompts."""
