"""From a model to a trace."""
