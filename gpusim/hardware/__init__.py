"""Hardware models and the occupancy arithmetic."""

#: The hardware model of a step whose GPU has none, by name.
DEFAULT_HARDWARE = "h200"
