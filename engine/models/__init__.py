"""Files to weights to hidden states: checkpoints, configurations, architectures."""
