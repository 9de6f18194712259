"""Search: bounds, the anytime search, and what it found put into words."""
