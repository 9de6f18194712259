"""Code shared by several policies; each published system is a file of the parent package."""
