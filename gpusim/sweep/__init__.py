"""Sweeps over traces, hardware models, policies and stream counts, on local processes or a Dask cluster."""
