"""The part of the JobSet API that the example writes, as a hand-written schema, and its checker. Unknown fields are errors.

From the public API types: kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go (JobSetSpec, ReplicatedJob, Network,
SuccessPolicy, FailurePolicy); for everything below `template`, Kubernetes' batch/v1 JobSpec and core/v1 PodSpec.
"""

import re
from typing import Any

_NAME = {"type": str, "pattern": r"[a-z]([-a-z0-9]*[a-z0-9])?", "most": 63}
_TEXT, _COUNT, _YES = {"type": str}, {"type": int, "least": 0}, {"type": bool}


def _object(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": dict, "fields": fields, "required": required}


def _list(of: Any) -> dict[str, Any]:
    return {"type": list, "of": of}


_CONTAINER = _object(
    ("name", "image"),
    name=_NAME,
    image=_TEXT,
    command=_list(_TEXT),
    args=_list(_TEXT),
    workingDir=_TEXT,
    env=_list(
        _object(
            ("name",),
            name={"type": str, "pattern": r"[-._a-zA-Z][-._a-zA-Z0-9]*"},
            value=_TEXT,
            valueFrom=_object(fieldRef=_object(("fieldPath",), fieldPath=_TEXT)),
        )
    ),
    ports=_list(_object(("containerPort",), containerPort={"type": int, "least": 1})),
    resources=_object(limits={"type": dict, "any": {"type": (int, str)}}),
    volumeMounts=_list(_object(("name", "mountPath"), name=_NAME, mountPath={"type": str, "pattern": r"[^:]+"})),
)
_POD = _object(
    ("containers",),
    restartPolicy={"type": str, "one_of": ("Never", "OnFailure")},  # a Job's pods may not be Always
    terminationGracePeriodSeconds=_COUNT,
    containers=_list(_CONTAINER),
    volumes=_list(
        _object(
            ("name",),
            name=_NAME,
            persistentVolumeClaim=_object(("claimName",), claimName=_TEXT),
            emptyDir=_object(medium={"type": str, "one_of": ("", "Memory")}),
        )
    ),
)
_JOB = _object(
    ("template",),
    backoffLimit=_COUNT,
    completionMode={"type": str, "one_of": ("Indexed", "NonIndexed")},
    completions=_COUNT,
    parallelism=_COUNT,
    template=_object(("spec",), metadata={"type": dict, "any": {"type": dict}}, spec=_POD),
)
_TEXTS = {"type": dict, "any": _TEXT}
SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"type": str, "one_of": ("jobset.x-k8s.io/v1alpha2",)},
    kind={"type": str, "one_of": ("JobSet",)},
    metadata=_object(("name",), name=_NAME, labels=_TEXTS, annotations=_TEXTS),
    spec=_object(
        replicatedJobs=_list(
            _object(("name", "template"), name=_NAME, replicas=_COUNT, template=_object(("spec",), spec=_JOB))
        ),
        network=_object(enableDNSHostnames=_YES, subdomain=_NAME, publishNotReadyAddresses=_YES),
        successPolicy=_object(
            ("operator",), operator={"type": str, "one_of": ("All", "Any")}, targetReplicatedJobs=_list(_TEXT)
        ),
        failurePolicy=_object(maxRestarts=_COUNT),
        suspend=_YES,
        ttlSecondsAfterFinished=_COUNT,
    ),
)


def violations(value: Any, schema: dict[str, Any] = SCHEMA, where: str = "") -> list[str]:
    """Everything in `value` that the schema does not allow."""
    kind = schema["type"]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        return [f"{where}: {value!r} is not {kind}"]
    found: list[str] = []
    if "fields" in schema:
        found += [f"{where}.{key}: unknown" for key in value if key not in schema["fields"]]
        found += [f"{where}.{key}: missing" for key in schema["required"] if key not in value]
        for key in value.keys() & schema["fields"].keys():
            found += violations(value[key], schema["fields"][key], f"{where}.{key}")
    for key, one in value.items() if "any" in schema else ():
        found += violations(one, schema["any"], f"{where}.{key}")
    for index, one in enumerate(value if "of" in schema else ()):
        found += violations(one, schema["of"], f"{where}[{index}]")
    if "one_of" in schema and value not in schema["one_of"]:
        found.append(f"{where}: {value!r} is not one of {schema['one_of']}")
    if "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        found.append(f"{where}: {value!r} does not match {schema['pattern']}")
    if "least" in schema and value < schema["least"]:
        found.append(f"{where}: {value} < {schema['least']}")
    if "most" in schema and len(value) > schema["most"]:
        found.append(f"{where}: longer than {schema['most']}")
    return found
