"""The command `gpusim`, and `python -m gpusim`."""

import sys


def main() -> None:
    """Import the command line, then run it; an interrupt during the import, half a second, is one line, too."""
    try:
        from gpusim.cli import main as run
    except KeyboardInterrupt:
        from gpusim.errors import EXIT_INTERRUPTED, INTERRUPTED

        sys.stderr.write(f"{INTERRUPTED}\n")
        sys.exit(EXIT_INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
