"""The launches of a run as Kubernetes JobSets, to be applied by hand. batchwright itself does not run on Kubernetes.

    python examples/kubernetes/jobsets.py RUN_DIR --image IMAGE --claim CLAIM

Each launch is one JobSet (jobset.x-k8s.io/v1alpha2) with one Indexed Job of one pod per node. Each pod runs torchrun with
the pod's index as its node rank. The JobSet's headless service gives the pods stable names; the first pod is the
rendezvous. `maxRestarts` is 0: a launch that is repeated needs a new launch number, and so a new JobSet.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.core.nodes.policies import Launch
from batchwright.launch.directory import RunDirectory
from batchwright.launch.engine import Job
from batchwright.launch.records import RunPlan
from batchwright.launch.work import launch_end, work
from batchwright.processes.start import torchrun
from batchwright.rundir import atomic

PORT = 29500
_WORKERS = "ranks"


@dataclass(frozen=True)
class Pods:
    """What the pods of all launches share."""

    image: str = "IMAGE"  # an image with batchwright and the training code
    claim: str = "CLAIM"  # the persistent volume claim of the run directory, mounted in all pods
    gpu: str | None = "nvidia.com/gpu"  # the resource name of a device; None: no resource is requested
    python: str = "python"


def label(text: str, most: int = 40) -> str:
    """A valid Kubernetes name (RFC 1123): lower-case letters, digits and hyphens, a letter first.

    >>> label("My run's $(rm) dir"), label("2024")
    ('my-run-s-rm-dir', 'run-2024')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:most].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def manifests(directory: RunDirectory, plan: RunPlan, pods: Pods | None = None) -> list[dict[str, Any]]:
    """One JobSet per launch of a plan."""
    doing = work(directory, plan)
    return [
        manifest(directory, plan, launch, doing.job(launch, launch.index + 1, launch.start_sample), pods or Pods())
        for launch in plan.launches
    ]


def manifest(directory: RunDirectory, plan: RunPlan, launch: Launch, job: Job, pods: Pods) -> dict[str, Any]:
    """The JobSet of one launch."""
    # The longest name made from this is <jobset>-ranks-0-<pod>: a host name has at most 63 characters.
    name = f"{label(directory.path.name)}-launch-{launch.index + 1}"
    first = f"{name}-{_WORKERS}-0-0.{name}"
    environment = {**job.environment, "PET_MASTER_ADDR": first, "PET_MASTER_PORT": str(PORT)}
    container: dict[str, Any] = {
        "name": "rank",
        "image": pods.image,
        "command": list(_command(job, pods)),
        "workingDir": str(job.working_directory),
        "env": [*({"name": key, "value": _literal(value)} for key, value in environment.items()), _NODE_RANK],
        "volumeMounts": [
            {"name": "run", "mountPath": str(directory.path)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    if not job.direct:
        container["ports"] = [{"containerPort": PORT}]
    if pods.gpu:
        container["resources"] = {"limits": {pods.gpu: job.ranks_per_node}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(1, int(job.grace_seconds)),
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": pods.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    template = {
        "spec": {
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": launch.nodes,
            "parallelism": launch.nodes,
            "template": {"spec": pod},
        }
    }
    stages = [plan.stages[index].global_batch_size for index in launch.stages]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "batchwright"},
            "annotations": {
                "batchwright/samples": f"{launch.start_sample}-{launch_end(plan, launch)}",
                "batchwright/global-batch-sizes": ",".join(map(str, stages)),
            },
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": template}],
        },
    }


_NODE_RANK = {
    "name": "PET_NODE_RANK",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}},
}


def _literal(value: str) -> str:
    """Kubernetes expands $(NAME) in values and commands; $$ is a literal $.

    >>> _literal("$(HOME) costs $5")
    '$$(HOME) costs $$5'
    """
    return value.replace("$", "$$")


def _command(job: Job, pods: Pods) -> tuple[str, ...]:
    argv = tuple(pods.python if argument == sys.executable else argument for argument in job.argv)
    if not job.direct:
        seconds = max(1, int(job.grace_seconds))
        nodes, logs = f"--nnodes={job.nodes}", job.directory / "torchrun"
        argv = (*torchrun(pods.python, nodes, ranks=job.ranks_per_node, log_dir=logs, shutdown_seconds=seconds), *argv)
    return tuple(_literal(argument) for argument in argv)


def render(document: Mapping[str, Any]) -> str:
    """A manifest as JSON, which is also YAML: every value stays what it is."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write(directory: RunDirectory, plan: RunPlan, pods: Pods | None = None) -> list[Path]:
    """Write RUN/manifests/launch-N.yaml for every launch, and the spec files that the ranks of a task read."""
    doing = work(directory, plan)
    for launch in plan.launches:
        doing.prepare(launch, launch.index + 1, launch.start_sample)
    folder = directory.path / "manifests"
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for number, document in enumerate(manifests(directory, plan, pods), 1):
        paths.append(folder / f"launch-{number}.yaml")
        atomic.write(paths[-1], render(document), mode=0o600)  # it holds the environment's values
    return paths


def main() -> None:
    """Write the manifests of a planned run and print their paths."""
    parser = argparse.ArgumentParser(description="Write the launches of a run as Kubernetes JobSets.")
    parser.add_argument("run_dir", help="a run directory with a plan.json")
    parser.add_argument("--image", default=Pods.image, help="an image with batchwright and the training code")
    parser.add_argument("--claim", default=Pods.claim, help="the persistent volume claim of the run directory")
    parser.add_argument("--gpu", default=Pods.gpu, help="the resource name of a device; empty: none")
    given = parser.parse_args()
    directory = RunDirectory(given.run_dir)
    for path in write(directory, directory.plan(), Pods(given.image, given.claim, given.gpu or None)):
        print(path)


if __name__ == "__main__":
    main()
