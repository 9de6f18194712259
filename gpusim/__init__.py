"""gpusim: predict, search and prove concurrent schedules of a PyTorch step on a GPU."""

__version__ = "0.1.0"
