"""The command line; commands are thin: they read, call the library, and print."""

from __future__ import annotations

import gc
import sys

import click

from gpusim.cli.app import app
from gpusim.cli.bench import bench
from gpusim.cli.catalogue import hardware, policies, traces
from gpusim.cli.common import in_words_of_the_command_line, tell, usage_line
from gpusim.cli.explain import explain
from gpusim.cli.gpu import calibrate, capture, replay, validate
from gpusim.cli.importing import doctor, export, import_command
from gpusim.cli.limits import limits
from gpusim.cli.memory import memory
from gpusim.cli.output import ReaderGoneError, checked_output, quiet_errors
from gpusim.cli.parallel import parallel
from gpusim.cli.simulation import explore, simulate
from gpusim.cli.sweep import sweep
from gpusim.cli.transfer import transfer
from gpusim.cli.whatif import figure, whatif
from gpusim.errors import EXIT_INTERRUPTED, EXIT_USER_ERROR, INTERRUPTED, GpusimError
from gpusim.version import __version__

#: Commands as grouped by `--help`, each with a short summary.
GROUPS = {
    "Predict and analyse (no GPU needed)": {
        "explore": "Find the fastest schedule and whether it is worth it",
        "simulate": "Predict one schedule",
        "limits": "Show what limits concurrency between ops",
        "explain": "Explain why a schedule is not faster",
        "whatif": "Predict with other SMs, bandwidth, costs, faster ops",
        "transfer": "Use a schedule on another batch or GPU",
        "memory": "Compare memory policies; plan within a byte budget",
        "parallel": "Split a step over several GPUs, layer by layer",
        "sweep": "Simulate many traces, GPUs and policies",
        "app": "Open the dashboard in a browser",
        "figure": "Draw a figure of the dashboard",
    },
    "Prove on a GPU": {
        "capture": "Capture one step of a model",
        "replay": "Run a schedule, check its outputs and time it",
        "validate": "Compare predictions with replays of a recipe",
        "calibrate": "Measure this GPU's hardware model",
    },
    "Traces you already have (no GPU needed)": {
        "import": "Make a trace from a profile (torch, nsys, ncu, Chakra)",
        "doctor": "Identify a profile or trace, and what it lacks",
        "export": "Write a timeline for HTA, TraceLens or Chakra",
    },
    "List what is available": {
        "traces": "List the bundled traces",
        "hardware": "List the hardware models, or compare two",
        "policies": "List the policies that --policy takes",
        "bench": "Measure the speed of the engines on this machine",
    },
}


class GroupedCommands(click.Group):
    """Command group that lists its commands under the headings of `GROUPS`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one help section per group."""
        for heading, summaries in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(list(summaries.items()))


@click.group(
    cls=GroupedCommands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="gpusim")
@click.pass_context
def cli(context: click.Context) -> None:
    """Predict, search and prove concurrent schedules of a PyTorch step on a GPU.

    \b
    No GPU needed:   gpusim explore googlenet-train-b8
                     gpusim app
    On a GPU:        gpusim capture torchvision:googlenet --mode train --batch 8 -o t.json.gz
                     gpusim explore t.json.gz -o best.json
                     gpusim replay t.json.gz --schedule best.json
    """  # noqa: D301  (click marks preformatted lines by the character itself)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    explore,
    simulate,
    limits,
    explain,
    memory,
    parallel,
    sweep,
    capture,
    replay,
    calibrate,
    validate,
    traces,
    hardware,
    policies,
    bench,
    whatif,
    transfer,
    figure,
    app,
    import_command,
    doctor,
    export,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line: a user's mistake is one line on standard error and exit code 2, a bug a traceback.

    If the reader of standard output goes away (`| head -1`), the command ends silently with exit code 0.
    """
    # A trace is millions of objects without cycles; usual garbage collection would take a third of reading it.
    gc.set_threshold(1_000_000, 50, 50)
    with quiet_errors():
        try:
            with checked_output():
                cli(standalone_mode=False)
        except GpusimError as error:
            tell(f"gpusim: {in_words_of_the_command_line(error)}", err=True)
            sys.exit(EXIT_USER_ERROR)
        except click.ClickException as error:
            tell(f"gpusim: {usage_line(error.format_message(), sys.argv[1:])}", err=True)
            sys.exit(EXIT_USER_ERROR)
        except (click.Abort, KeyboardInterrupt):
            tell(INTERRUPTED, err=True)
            sys.exit(EXIT_INTERRUPTED)
        except ReaderGoneError:
            sys.exit(0)


__all__ = ["cli", "main"]
