"""`gpusim.optimize`: a step as a callable that runs the best schedule found on the user's own tensors.

In reading order: `front` (the function) and `dynamo` (the backend of `torch.compile`, with `packing` between its two
graphs) take what the user gives, `steps` makes a step on fixed inputs of it, and `callable` chooses a captured step at
each call.

`make` finds a captured step: `eager_step` runs the user's own, with `snapshot` and `python_state` to restore what that
changes; `captured`, `lists` and `optimizers` record it; `fronts`, `fused`, `image_layout` and `mix` choose kernels;
`choose` searches and tries schedules, `memory` makes memory plans; `check` and `verify` compare with eager; `cache` and
`kept_step` keep what was found. `executors` has what depends on the device: `on_cuda`, or `arena_runner` on a CPU.
`alone`, `progress` and `garbage` surround the work.

`variant` runs a captured step: `graph_copies` in the graph or `copies` around it, `turns` between calls, `slots` and
`layouts` for the user's tensors. It
looks whether the capture still holds: `hooks`, `modes`, and `reads` of what `gpusim.gpu.reach` finds in the code,
compared by `unchanged`.

`measure` and `peers` time it beside `torch.compile`, `ablations` beside itself with one freedom less, with weights of
`sensitive` that let a wrong result show; `race` and `race_check` look for missing events in schedules.
"""
