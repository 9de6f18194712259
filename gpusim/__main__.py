"""`python -m gpusim`."""

from gpusim.cli import main

main()
