"""The command line. It knows the commands' names and their one-line help; the work is in the rooms.

A command's module is loaded when the command is called, so ``--help`` needs neither torch nor matplotlib. To add
one: write a click command in its room and give it a line in COMMANDS.
"""

import importlib
import sys
from pathlib import Path

import click

# name: (module:object, one line of help). A command whose module is not there is not listed.
COMMANDS = {
    "report": ("batch_variance.cli:report", "Run the notebooks and write the HTML report."),
    "schedule": ("batch_variance.schedules.command:schedule", "Show how FlashMLA's scheduler splits a batch of rows."),
    "audit": ("batch_variance.hooks.command:audit", "Find the operations of a model that depend on the batch."),
    "probe": ("batch_variance.serving.command:probe", "Ask a server the same prompts at several concurrencies."),
    "sweep": ("batch_variance.studies.command:sweep", "Run a notebook over a grid of parameters."),
    "bench": ("batch_variance.kernels.command:bench", "Time the kernels and record it (needs CUDA)."),
}


class Commands(click.Group):
    """Commands loaded by name; BadInput becomes one line on stderr and exit status 2."""

    def list_commands(self, ctx):
        return [name for name, (target, _) in COMMANDS.items() if _exists(target)]

    def get_command(self, ctx, name):
        if name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx, formatter):
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except ValueError as error:
            from .common import BadInput

            if not isinstance(error, BadInput):
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(2)


def _exists(target: str) -> bool:
    # Looked up as a file: importlib's find_spec would import the room, and with it torch.
    parts = target.partition(":")[0].split(".")[1:]
    return Path(__file__).parent.joinpath(*parts).with_suffix(".py").is_file()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="batch-variance")
def main():
    """Why a language model's greedy output depends on what else is in the batch, and how to end it."""


@click.command()
@click.option("--quick", is_flag=True, help="Smaller parameters, same code: minutes instead of tens of minutes.")
@click.option("--only", metavar="NN,NN", help="Numbers of the notebooks to run, such as 01,03.")
@click.option(
    "--device", default="auto", show_default=True, metavar="auto|cpu|cuda", help="Where the notebooks compute."
)
@click.option("--out", default="report", show_default=True, metavar="DIR", help="Folder that the report is written to.")
@click.option(
    "-p", "parameters", multiple=True, metavar="NAME=VALUE",
    help="Set a notebook's parameter, as Python literal or bare string; 01.NAME=VALUE sets it in that notebook only.",
)  # fmt: skip
@click.option("-f", "file", metavar="FILE", help="Run what a parameters file names, with its values; -p is stronger.")
@click.option("--compare", metavar="DIR", help="Say on the index what changed against this report, or summary.json.")
def report(quick, only, device, out, parameters, file, compare):
    """Run the notebooks and write the HTML report.

    Exit status: 0; 1 if a notebook failed or a check's verdict is fail; 2 for input that cannot be used; 130 after
    Ctrl-C.
    """
    from .reporting.parameters import parse_override, read_parameters_file, stronger
    from .reporting.runner import run_report

    named, kept = read_parameters_file(file) if file else (None, {})
    overrides = stronger(kept, dict(parse_override(text) for text in parameters))
    sys.exit(run_report(quick, only or named, device, out, overrides, compare_with=compare))
