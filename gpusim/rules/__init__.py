"""Hardware rules, one module of plain functions of numbers each, called by engines, bounds and policies.

A function takes numbers, and a section of the hardware model (`gpusim.formats.hardware`) for its constants. The
compiled engine compiles the same functions; its record of a hardware model has the same names. Rules therefore use only
arithmetic, and the order of additions and multiplications is part of a rule: times are equal to the last bit.
"""
