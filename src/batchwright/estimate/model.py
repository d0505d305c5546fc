"""`--model PATH|NAME`: where the configuration of a model is. Needs no torch; a name of the hub needs a network."""

from __future__ import annotations

import json
import os
import re
import socket
from importlib.util import find_spec
from urllib.parse import urlsplit
from urllib.request import getproxies

from batchwright.core.errors import ConfigError, EnvironmentFault, MissingExtraError

_NAME = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
_SECONDS = 5.0  # without a network, huggingface_hub itself tries for half a minute
LARGEST_CONFIG = 2**22


def find_config(model: str, lora: int = 0) -> str:
    """The path of a model's config.json: a file, a folder with one, or downloaded by the name of the hub.

    >>> find_config("./missing")
    Traceback (most recent call last):
    batchwright.core.errors.ConfigError: model='./missing' does not exist. Give a config.json, its folder or a name of the hub.
    """
    for package in ("torch", "transformers", *(["peft"] if lora else [])):
        if find_spec(package) is None:
            raise MissingExtraError(
                f"model needs {package}, and it is not installed. Install it: pip install 'batchwright[hf]'.",
                field="model",
                given=model[:200],
                nearest=("batchwright[hf]",),
            )
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
        if not os.path.isfile(path):
            raise ConfigError(
                f"model={model[:200]!r} is a folder without config.json.", field="model", given=model[:200]
            )
    elif not os.path.exists(path):
        if not re.fullmatch(_NAME, model):
            raise ConfigError(
                f"model={model[:200]!r} does not exist. Give a config.json, its folder or a name of the hub.",
                field="model",
                given=model[:200],
            )
        path = _download(model)
    return _checked(path, model)


def _checked(path: str, model: str) -> str:
    """Refuse what is not a configuration before torch is loaded, which takes seconds."""
    problem = "it is not a regular file"
    if os.path.isfile(path):
        problem = f"it is larger than {LARGEST_CONFIG >> 20} MiB"
        if os.path.getsize(path) <= LARGEST_CONFIG:
            try:
                with open(path, encoding="utf-8") as file:
                    read = json.load(file)
                problem = "" if isinstance(read, dict) and "model_type" in read else "it has no key model_type"
            except (OSError, ValueError, RecursionError) as error:
                problem = f"{error}"
    if problem:
        message = f"model={model[:200]!r} is not a configuration of transformers: {problem}."
        raise ConfigError(message, field="model", given=model[:200])
    return os.path.abspath(path)


def _download(name: str) -> str:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return cached
    reason = (
        "HF_HUB_OFFLINE is set, and it is not in the cache" if constants.HF_HUB_OFFLINE else _unreachable(constants)
    )
    if reason is None:
        try:
            return hf_hub_download(name, "config.json", etag_timeout=_SECONDS)
        except Exception as error:  # of httpx, of the hub, of the disk
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise EnvironmentFault(
        f"model={name!r} is neither a file or folder here nor can it be loaded from the hub: {reason.rstrip('.')}. Copy the "
        "model's config.json to this machine and give its path: model=./config.json.",
        field="model",
        given=name,
    )


def _unreachable(constants: object) -> str | None:
    """Why the hub cannot be reached; None if it can, or if a proxy decides."""
    address = urlsplit(str(getattr(constants, "ENDPOINT", "")))
    if getproxies().get(address.scheme):
        return None
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=_SECONDS).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached ({error.strerror or error})"
    return None
