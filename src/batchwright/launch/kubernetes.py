"""A launch as a Kubernetes JobSet, to look at and to apply by hand: `--dry-run --engine kubernetes`. Nothing is run here.

Per launch one JobSet (jobset.x-k8s.io/v1alpha2) with one replicated Job, Indexed, of as many pods as the launch has
nodes; torchrun in each, with the pod's index as its node. The pods have stable names through the JobSet's headless
service, so that the first is the rendezvous. Restarts are the next JobSet's business (`maxRestarts` 0): a launch that is
repeated has a number of its own.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright.core.nodes.policies import Launch

from .directory import RunDirectory
from .engine import Job
from .records import RunPlan
from .work import launch_end, work

PORT = 29500
_WORKERS = "ranks"


@dataclass(frozen=True)
class Pods:
    """What the pods of every launch have in common."""

    image: str = "IMAGE"  # to be filled in: an image with batchwright and the training code in it
    claim: str = "CLAIM"  # the persistent volume that holds the run directory, for all pods
    gpu: str | None = "nvidia.com/gpu"  # the resource a device is; None without one
    python: str = "python"


def label(text: str, most: int = 40) -> str:
    """A name as Kubernetes allows it (RFC 1123): lower case, digits and hyphens, a letter first.

    >>> label("My run's $(rm) dir"), label("2024")
    ('my-run-s-rm-dir', 'run-2024')
    """
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:most].strip("-")
    return words if words[:1].isalpha() else f"run-{words}".strip("-")


def manifests(directory: RunDirectory, plan: RunPlan, pods: Pods | None = None) -> list[dict[str, Any]]:
    """One JobSet per launch of a plan."""
    doing = work(directory, plan)
    return [
        manifest(directory, plan, launch, doing.job(launch, launch.index + 1, launch.start_sample), pods or Pods())
        for launch in plan.launches
    ]


def manifest(directory: RunDirectory, plan: RunPlan, launch: Launch, job: Job, pods: Pods) -> dict[str, Any]:
    """The JobSet of one launch."""
    # The longest name below: <jobset>-ranks-0-<pod>, of at most 63 characters for a host name.
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
    """Kubernetes expands $(NAME) in values and commands; $$ is a plain $.

    >>> _literal("$(HOME) costs $5")
    '$$(HOME) costs $$5'
    """
    return value.replace("$", "$$")


def _command(job: Job, pods: Pods) -> tuple[str, ...]:
    argv = tuple(pods.python if word == sys.executable else word for word in job.argv)
    if not job.direct:
        torchrun = (
            pods.python, "-m", "torch.distributed.run", f"--nnodes={job.nodes}",
            f"--nproc-per-node={job.ranks_per_node}", "--max-restarts=0",
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--no-python",
        )  # fmt: skip
        argv = (*torchrun, *argv)
    return tuple(_literal(word) for word in argv)


def render(document: Mapping[str, Any]) -> str:
    """A manifest as YAML, which JSON is part of: no value can be anything but itself."""
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def write(directory: RunDirectory, plan: RunPlan, pods: Pods | None = None) -> list[Path]:
    """Write the manifests into the run directory, and what their ranks read; `kubectl apply -f` takes one at a time."""
    doing = work(directory, plan)
    for launch in plan.launches:
        doing.prepare(launch, launch.index + 1, launch.start_sample)
    folder = directory.path / "manifests"
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for number, document in enumerate(manifests(directory, plan, pods), 1):
        paths.append(folder / f"launch-{number}.yaml")
        paths[-1].unlink(missing_ok=True)
        # For its owner from its first moment: it holds the environment's values.
        with open(os.open(paths[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(render(document))
    return paths
