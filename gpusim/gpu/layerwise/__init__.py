"""Execution of plans for several GPUs: actual shares of layers and collectives, on GPUs (NCCL) or CPUs (gloo)."""
