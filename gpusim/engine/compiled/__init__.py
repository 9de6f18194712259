"""The compiled engine's parts: arrays, pool rules, device, event loops, lowering. `gpusim.engine.fast` drives them."""
