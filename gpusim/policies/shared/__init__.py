"""What several policies share. Each published system is a file of the package above."""
