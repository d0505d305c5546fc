"""The supervisor on a login node: as any other, but it may take fewer nodes, and says what Slurm says."""

from __future__ import annotations

from batchwright.core.nodes import Launch

from .chain import write_link
from .engine import Handle, Poll
from .records import Ending, Failure, Manifest, Progress
from .slurm_elastic import affordable, on_nodes
from .slurm_site import SlurmRun
from .supervisor import Supervisor
from .work import work


class SlurmSupervisor(Supervisor):
    """A supervisor whose launches are jobs."""

    def _launch(self, launch: Launch, position: int) -> Ending:
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
        self, manifest: Manifest, polled: Poll, progress: Progress, failure: Failure | None, stopping: bool,
        handle: Handle | None = None,
    ) -> Ending:  # fmt: skip
        """What Slurm or the job says is the reason, where no rank has one of its own."""
        if failure is None and polled.detail and not stopping and self._work.position() < manifest.end_sample:
            ranks = self._engine.logs(handle) if handle else ()
            if not any(rank.code for rank in ranks):
                failure = Failure(polled.detail, code=polled.code)
        return super()._record(manifest, polled, progress, failure, stopping, handle)
