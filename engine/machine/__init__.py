"""What this computer has and can do: devices, memory, a compiler. Knows no model."""
