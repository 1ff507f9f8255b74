"""The records that everyone reads: a request, a batch, a step, and who listens to them."""
