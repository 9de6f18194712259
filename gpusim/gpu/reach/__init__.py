"""Models, optimizers and values that the code of a step can reach, for captures and for `gpusim.optimize`.

`search` walks Python's objects by the `names` that code uses, `raw` reads them without running code of the user's, and
`series` tells whether a step has taken values from iterators and queues among them.
"""
