"""The command line. Commands are thin: they read, call the library, and print."""

from __future__ import annotations

import gc
import os
import sys

import click

from gpusim import __version__
from gpusim.cli.analysis import limits
from gpusim.cli.app import app
from gpusim.cli.bench import bench
from gpusim.cli.catalogue import hardware, traces
from gpusim.cli.explain import explain
from gpusim.cli.gpu import calibrate, capture, replay, validate
from gpusim.cli.simulation import explore, simulate
from gpusim.cli.sweep import sweep
from gpusim.cli.whatif import figure, whatif
from gpusim.errors import EXIT_USER_ERROR, GpusimError

EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="gpusim")
def cli() -> None:
    """Predict, search and prove concurrent schedules of a PyTorch step on a GPU.

    \b
    No GPU needed:   gpusim explore googlenet-train-b8
                     gpusim app
    On a GPU:        gpusim capture torchvision:googlenet --mode train --batch 8 -o t.json.gz
                     gpusim explore t.json.gz -o best.json
                     gpusim replay --trace t.json.gz --schedule best.json
    """  # noqa: D301  (click's mark for "keep these lines" is the character, not the two letters)


for command in (
    explore,
    simulate,
    limits,
    explain,
    sweep,
    capture,
    replay,
    calibrate,
    validate,
    traces,
    hardware,
    bench,
    whatif,
    figure,
    app,
):
    cli.add_command(command)


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit code 2, our own bug a traceback."""
    # A trace is millions of objects without a cycle: looking for cycles as often as usual takes a third of reading it.
    gc.set_threshold(1_000_000, 50, 50)
    try:
        cli(standalone_mode=False)
    except GpusimError as error:
        click.echo(f"gpusim: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USER_ERROR)
    except (click.Abort, KeyboardInterrupt):
        click.echo("gpusim: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


__all__ = ["cli", "main"]
