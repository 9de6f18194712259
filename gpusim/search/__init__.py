"""Search: the anytime search for schedules, its budget, and the verdict on what it gains."""
