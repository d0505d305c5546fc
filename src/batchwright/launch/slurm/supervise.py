"""The supervisor on a login node: as any other, but it may take fewer nodes, and says what Slurm says."""

from __future__ import annotations

from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import write_json
from batchwright.launch.engine import Handle, Poll
from batchwright.launch.records import Ending, Failure, LaunchProgress, Manifest
from batchwright.launch.supervisor import Supervisor
from batchwright.launch.work import work

from .chain import write_link
from .commands import Withdrawn
from .elastic import affordable, on_nodes
from .engine import SlurmEngine
from .site import SlurmRun


class SlurmSupervisor(Supervisor):
    """A supervisor whose launches are jobs."""

    _away = ""  # what was last said of a controller that is away

    def _launch(self, launch: Launch, position: int) -> Ending:
        """Submit it and see it end; somebody may wish to stop before there is a controller to submit it to."""
        if isinstance(self._engine, SlurmEngine):
            self._engine.pause = self._without_controller
        try:
            return self._sized(launch, position)
        except Withdrawn:
            # With an ending: a job of it that the controller took without an answer finds nothing to do.
            number = max(self._directory.numbers())
            ending = Ending(number, "stopped", position, self._clock())
            write_json(self._directory.launch(number) / "ending.json", ending)
            return ending

    def _without_controller(self, seconds: float, reason: str) -> bool:
        if reason != self._away:
            self._away = reason
            self._listener.note(f"Slurm's controller does not answer, and is asked again: {reason}")
        self._interrupts.sleep(seconds)
        return not self._stop_requests()

    def _sized(self, launch: Launch, position: int) -> Ending:
        """On the nodes of the plan, or, where the site is elastic, on those that the cluster can give soon."""
        run = SlurmRun.load(self._directory)
        if not run.site.elastic:
            return super()._launch(launch, position)
        planned, doing = self._plan, self._work
        nodes = affordable(planned, launch, run.site, write_link(self._directory, planned, run, launch))
        if nodes != launch.nodes:
            self._listener.note(
                f"launch {launch.index + 1} takes {nodes} nodes: {launch.nodes} would have to be waited for"
            )
        self._plan, launch = on_nodes(planned, launch, nodes) or (planned, launch)
        self._work = work(self._directory, self._plan, self._pause)
        try:
            return super()._launch(launch, position)
        finally:
            self._plan, self._work = planned, doing

    def _record(
        self, manifest: Manifest, polled: Poll, progress: LaunchProgress, failure: Failure | None, stopping: bool,
        handle: Handle | None = None,
    ) -> Ending:  # fmt: skip
        """What Slurm or the job says is the reason, where no rank has one of its own."""
        if failure is None and polled.detail and not stopping and self._work.position() < manifest.end_sample:
            ranks = self._engine.logs(handle) if handle else ()
            if not any(rank.code for rank in ranks):
                failure = Failure(polled.detail, code=polled.code)
        return super()._record(manifest, polled, progress, failure, stopping, handle)
