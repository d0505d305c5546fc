"""The command line: one file per verb, imported when it is called."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from errno import ENOSPC
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from batchwright import __version__

# Verbs by the group that `--help` shows them in.
GROUPS = {
    "decide": {
        "plan": "Work out a batch from the numbers you know.",
        "ramp": "Plan a batch that grows: stages, nodes, cost, learning rate.",
        "rl": "Plan batches of reinforcement learning: prompts, responses, updates.",
        "convert": "Write the batch of a configuration in the keys of another framework.",
    },
    "measure": {
        "probe": "Measure which batch fits in memory, which is fast, and why.",
        "estimate": "Predict peak memory by batch, without training and without a GPU.",
        "check": "Check a task or a configuration: is the gradient, or the batch, what you think?",
    },
    "run": {
        "run": "Train the whole ramp, launch by launch, and restart after failures.",
        "report": "Make a report: one HTML file with charts and tables that opens offline.",
    },
}
_VERBS = [verb for verbs in GROUPS.values() for verb in verbs]


class Verbs(click.Group):
    """The group of all verbs; a verb is imported only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return _VERBS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        from importlib import import_module

        return import_module(f".{cmd_name}", __name__).command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in _VERBS:
            from difflib import get_close_matches

            close = get_close_matches(args[0], _VERBS, n=1)
            hint = f" Did you mean {close[0]}?" if close else f" The verbs are: {', '.join(_VERBS)}."
            raise click.UsageError(f"{args[0][:60]!r} is not a verb.{hint}", ctx=ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs by their names, without an import of each; flags as click does it."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        all_verbs = (item for verbs in GROUPS.values() for item in verbs.items())
        return [CompletionItem(verb, help=text) for verb, text in all_verbs if verb.startswith(incomplete)]

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Without errno: with it, click would exit with 1.
            raise BrokenPipeError("the reader closed the pipe") from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl(list(verbs.items()))


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    no_args_is_help=False,
    invoke_without_command=True,
    epilog="\b\nExample:\n  batchwright plan --global-batch-size 1024 --nodes 16 --devices-per-node 8",
)
@click.version_option(__version__, message="batchwright %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """The batch size of a training job, from end to end.

    Exit codes: 0 success, 1 a bug in batchwright, 2 an invalid request, 3 nothing fits in memory, 4 something is missing
    on this machine, 5 your code, a check or a run failed, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command line and exit. Users never see a traceback of batchwright."""
    argv = sys.argv[1:] if argv is None else argv
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # An argument may contain bytes that are not text.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): not an error, and nothing more can be written.
        os._exit(0)
    except OSError as error:
        # Standard output is a file on a full disk; perhaps standard error is, too.
        with suppress(OSError):
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}.\n")
        os._exit(4)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Open /dev/null for each standard stream that is closed (`>&-`).

    Python has None in its place, and the next file that is opened would get its number: a child process would write its
    output into that file.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def _run(argv: list[str]) -> int:
    try:
        code = cli.main(args=argv, prog_name="batchwright", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        sys.stderr.write("interrupted\n")
        return 130
    except click.exceptions.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == ENOSPC:
            raise
        own = argv[: argv.index("--")] if "--" in argv else argv  # the rest is the user's command
        return _report(error, as_json="--json" in own)


def _report(error: Exception, *, as_json: bool) -> int:
    from batchwright.core.errors import BatchwrightError, EnvironmentFault

    if isinstance(error, OSError) and not isinstance(error, BatchwrightError):
        # Every error of the operating system that no other place explains better.
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)[:200]}: "
        error = EnvironmentFault(f"{where}{error.strerror or error}.", given=where.removesuffix(": ") or None)
    if isinstance(error, BatchwrightError):
        code, record = error.exit_code, error.record()
        extra = {key: value for key, value in vars(error).items() if key in ("nearby", "remedies")}
    elif isinstance(error, click.ClickException):
        code, extra = 2, {}
        record = {"type": "UsageError", "message": error.format_message(), "field": None, "given": None, "nearest": []}
    else:
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        code, extra = 1, {}
        record = {
            "type": type(error).__name__,
            "message": f"This is a bug in batchwright ({type(error).__name__}: {error}; {last.filename}:{last.lineno}). "
            "Please report it with the command line.",
            "field": None,
            "given": None,
            "nearest": [],
        }
    try:
        if as_json:
            from .options import print_json

            print_json({"schema": 1, "error": record, **extra})
        else:
            for line in record["message"].splitlines():
                click.echo(f"error: {line}", err=True)
            if isinstance(error, click.UsageError) and error.ctx is not None:
                click.echo(f"See: {error.ctx.command_path} --help", err=True)
    except OSError:  # nobody reads it, or its disk is full: the exit code still says what happened
        os._exit(code)
    return code
