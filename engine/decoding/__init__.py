"""What a user may ask and gets, and logits to a token."""
