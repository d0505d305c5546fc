"""Each file of tests needs its framework (tests/needs.py). Modules that import one are left out of the search for doctests."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.needs import needs

collect_ignore = ["hf.py", "lit_cases.py", "sft"]
FRAMEWORKS = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}


@pytest.fixture(scope="module", autouse=True)
def _framework(request: pytest.FixtureRequest) -> None:
    """Before all other fixtures of the file, which import the framework."""
    for name, package in FRAMEWORKS.items():
        if request.path.name.startswith(f"test_{name}"):
            needs(package)


@pytest.fixture(scope="module")
def hf():
    """The cases; importing transformers takes seconds, so not while tests are collected."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.adapters import hf

        yield hf
    torch.set_num_threads(threads)


@pytest.fixture
def mixed(hf):
    """accelerate keeps the precision of a process; forget it before and after."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.fixture(scope="module")
def lit():
    """The cases and the adapter; importing Lightning takes seconds, so not while tests are collected."""
    torch.set_num_threads(1)
    from tests.adapters.test_lightning import importable

    return importable()
