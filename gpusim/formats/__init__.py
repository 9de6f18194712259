"""The documents that gpusim reads and writes, one module per file format."""
