"""A launch as a batch script. Nothing in it is interpreted that batchwright did not write or a site did not ask for.

The header holds no path: Slurm cannot have a newline there, expands % and ends at its own quotes. The body changes
directory and opens its log itself. Command and environment are not in the script at all: the job reads them from the
run directory, which is its owner's, so that no value ever passes through a shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .site import Site, quote

JOB_MODULE = "batchwright.launch.slurm.job"


@dataclass(frozen=True)
class Script:
    """What one job is, before it is text."""

    title: str
    name: str
    nodes: int
    tasks_per_node: int
    comment: str
    log: Path
    working_directory: Path
    python: str
    words: tuple[str, ...]  # for `batchwright.launch.slurm.job`
    shows: tuple[str, ...] = ()  # the command of the ranks, for people


def render(script: Script, site: Site) -> str:
    """The text of the script."""
    options = (
        f"--job-name={quote(script.name)}",
        f"--nodes={script.nodes}",
        f"--ntasks-per-node={script.tasks_per_node}",
        f"--comment={quote(script.comment)}",
        *site.lines(),
        f"--signal=B:USR1@{site.signal_seconds}",  # to the batch script alone, which asks every rank for a checkpoint
        "--no-requeue",  # a requeued job waits for two minutes: a new one does not
        "--output=/dev/null",  # the log is opened below
        "--chdir=/",
    )
    head = ["#!/bin/bash", f"# batchwright: {_comment(script.title)}", *(f"#SBATCH {option}" for option in options), ""]
    body = [
        f"bw_log={shlex.quote(str(script.log))}",
        'mkdir -p -- "${bw_log%/*}" && exec >>"$bw_log" 2>&1 </dev/null || exit 4',
        f"cd -- {shlex.quote(str(script.working_directory))} || exit 4",
        f"bw_job=({_words((script.python, '-P', '-m', JOB_MODULE, *script.words))})",
    ]
    if site.prologue:
        body += ["", 'bw_failed() { export BATCHWRIGHT_PROLOGUE_FAILED="$1 $2"; exec "${bw_job[@]}"; }']
        for number, command in enumerate(site.prologue, 1):
            # The check has a line of its own: a command may end in a comment.
            body += [command, f'bw_code=$?; [ "$bw_code" = 0 ] || bw_failed {number} "$bw_code"']
    if script.shows:
        body += ["", f"# runs: {_comment(_words(script.shows))}"]
    return "\n".join([*head, *body, 'exec "${bw_job[@]}"', ""])


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _comment(text: str) -> str:
    """One line, whatever is in it."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def srun_words(site: Site, *, nodes: int, ranks_per_node: int) -> tuple[str, ...]:
    """srun for one launch: every rank a task, or one torchrun on each node."""
    per_node = ranks_per_node if site.launcher == "srun" else 1
    words = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes * per_node}", f"--ntasks-per-node={per_node}",
        "--kill-on-bad-exit=1",  # ranks whose peer is gone would hang in a collective
        "--input=none", "--output=none", "--error=none",  # every rank has a log of its own
        "--distribution=block",
        "--export=ALL",  # a site's --export=NONE is for the job's own environment: ranks need what the job gives them
    ]  # fmt: skip
    if isinstance(site.container, str):
        words.append(f"--container-image={site.container}")
        words += [f"--container-mounts={','.join(site.container_mounts)}"] * bool(site.container_mounts)
    return (*words, *site.srun)


def rank_words(site: Site, directory: Path, argv: Sequence[str], python: str, variable: str) -> tuple[str, ...]:
    """What a task runs: the rank's parent, which keeps its log, and the rank; inside the container where there is one."""
    inside = site.python or python
    command = [inside if word == python else word for word in argv]
    prefix = site.container if isinstance(site.container, tuple) else ()
    return (*prefix, inside, "-P", "-m", "batchwright.launch.rank", str(directory), variable, *command)


def torchrun_words(python: str, directory: Path, *, nodes: int, ranks_per_node: int, grace: float) -> tuple[str, ...]:
    """torchrun on one node of several; its rank among the nodes is srun's, put in the environment by a shell word."""
    return (
        "bash", "-c", 'PET_NODE_RANK=$SLURM_NODEID exec "$@"', "torchrun",
        python, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks_per_node}",
        "--max-restarts=0", "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        f"--shutdown-timeout={max(1, int(grace))}", f"--log-dir={directory / 'torchrun'}", "--no-python",
    )  # fmt: skip
