"""`python -m gpusim.cli`."""

from gpusim.cli import main

main()
