"""What the code of a step can reach: `search` walks Python's objects, by the `names` that code uses."""
