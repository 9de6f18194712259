"""Constants and rules of the hardware model, measured on the GPU at hand."""
