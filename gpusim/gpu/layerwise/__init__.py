"""Execution of plans for several GPUs: real shares of layers, real collectives, on GPUs (NCCL) or CPUs (gloo)."""
