"""Files, limits, other processes and data folders, independent of the meaning of a file."""
