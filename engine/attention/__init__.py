"""The mathematics of attention, and where sequences lie. Knows no cache."""
