"""Layer-wise parallelism: each layer of a step has its own way of being split over several GPUs.

Source: Jia, Lin, Qi, Aiken, "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018
(the OptCNN system). In this order: `layers` and `from_trace` (what a step consists of), `configs` and `regions` (how a
layer may be split, and who holds what), `topology` and `communication` (links), `compute` (times of a share of a
layer), `costs` (both as tables), `eliminate`, `k_best`, `memory_limit` (the exact search), `plans`, `lowering` and
`makespan` (a plan on the engines), `explore` (all of it together), `dtensor` and `autoparallel` (other systems).
"""
