"""Sweeps: traces x hardware models x policies x stream counts, on local processes or a Dask cluster, into one store."""
