"""File formats: one document, one file. What they hold, not what is done with it."""
