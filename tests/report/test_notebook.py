"""Results show themselves in a notebook: a table and charts, with and without the extra."""

from __future__ import annotations

import sys

import pytest

import batchwright
from batchwright.launch.directory import RunDirectory
from batchwright.launch.status import status
from batchwright.report.notebook import VEGA_LITE
from tests.needs import needs
from tests.report import material

needs("vl_convert")


@pytest.fixture
def results(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=30)
    return {
        "plan": batchwright.plan(global_batch_size=64, devices=8),
        "ramp": material.gpt3_5b(),
        "probe": material.probe(),
        "estimate": material.estimate(),
        "run": status(RunDirectory(root)),
    }


def test_every_result_has_a_chart_and_shows_a_table_and_pictures(results):
    for kind, one in results.items():
        assert one.kind == kind
        assert one.chart()["$schema"].endswith("vega-lite/v5.json") and one.chart(theme="dark") != one.chart()
        shown = one._repr_mimebundle_()
        assert "<table>" in shown["text/html"] and "<svg" in shown["text/html"] and "<script" not in shown["text/html"]
        assert "http" not in shown["text/html"].replace("http://www.w3.org/", ""), "nothing is loaded"
        assert shown["text/plain"] == repr(one) and VEGA_LITE not in shown


def test_without_the_extra_the_notebook_draws_the_chart(results, monkeypatch):
    monkeypatch.setattr("batchwright.report.render.available", lambda: False)
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    for one in results.values():
        shown = one._repr_mimebundle_()
        assert shown == {"text/plain": repr(one), VEGA_LITE: one.chart()}, "JupyterLab would show HTML instead"


def test_a_run_whose_files_are_gone_is_shown_as_text(results, tmp_path):
    (tmp_path / "run" / "plan.json").unlink()
    assert set(results["run"]._repr_mimebundle_()) == {"text/plain"}


def test_a_chart_by_name(results):
    assert results["probe"].chart("memory")["title"]["text"] == "Memory"
    assert results["run"].chart("loss")["title"]["text"] == "Loss against samples"
