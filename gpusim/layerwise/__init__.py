"""Layer-wise parallelism: each layer of a step is split over several GPUs in its own way.

Source: Jia, Lin, Qi, Aiken, "Exploring Hidden Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018
(the OptCNN system). In reading order: `layers` and `from_trace` (the layers of a step), `configs` and `regions` (splits
of a layer and the GPUs that hold the parts), `topology` and `communication` (links), `compute` (times of shares of
layers), `costs` (both as tables), `eliminate`, `k_best`, `memory_limit` (the exact search), `plans`, `lowering` and
`makespan` (a plan on the engines), `explore` (all combined), `dtensor` and `autoparallel` (other systems).
"""
