"""From a trace and a schedule to a measurement."""
