"""Hardware models and the occupancy arithmetic."""
