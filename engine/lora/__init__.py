"""LoRA adapters: reading adapters, giving adapters slots in the model, mixing adapters within one batch."""
