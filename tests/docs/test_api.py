"""The API page is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("orbax")
pytestmark = pytest.mark.torch


def test_the_api_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("api", Path(__file__).parents[2] / "docs" / "api.py")
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "run `python docs/api.py`"
