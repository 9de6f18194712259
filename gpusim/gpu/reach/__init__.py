"""Models, optimizers and values that the code of a step can reach, for captures and for `gpusim.optimize`.

`search` walks Python's objects by the `names` that code uses, and `raw` reads them without running code of the user's.
"""
