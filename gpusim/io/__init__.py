"""Reading and writing: files, limits, other processes, data folders. Nothing here knows what a file means."""
