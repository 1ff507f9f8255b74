"""The parameters of a request, the records of its output, and the choice of a token from logits."""
