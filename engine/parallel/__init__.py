"""One model on several devices, each with a part of every layer."""
