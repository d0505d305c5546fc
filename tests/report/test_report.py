"""The verb: every kind of input, what is refused, hostile and damaged files, a long run, and the files that it writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright
from batchwright.core.errors import ConfigError, MissingExtraError
from batchwright.inputs import read_inputs
from batchwright.launch.directory import RunDirectory
from batchwright.launch.history import history
from batchwright.report import render
from batchwright.report.charts import CHARTS, charts_of
from batchwright.report.sections import section
from batchwright.rundir.events import COLUMNS, read_columns, read_events
from tests.cli.conftest import run as command_line
from tests.needs import needs
from tests.report import material

needs("vl_convert")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with one document of each kind, and a run."""
    folder = tmp_path_factory.mktemp("place")
    for kind, document in material.documents().items():
        (folder / f"{kind}.json").write_text(json.dumps(document))
    material.run_directory(folder / "train", steps=60)
    return folder


def files(place: Path) -> list[str]:
    return [str(place / "train"), *(str(place / f"{kind}.json") for kind in ("plan", "ramp", "probe", "estimate"))]


class Page(HTMLParser):
    """What is in a page: its elements, its text, and the charts' specifications."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.charts: dict[str, dict] = {}
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._in.append("charts" if dict(attrs).get("id") == "charts" else tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self._in.pop()

    def handle_data(self, data):
        if not self._in:
            self.text += data
        elif self._in[-1] == "charts":
            self.charts = json.loads(data)


def test_every_chart_of_every_kind_is_drawn_as_svg_and_png(place):
    for one in read_inputs(files(place)):
        found = charts_of(one.kind, one.document)
        assert list(found) == list(CHARTS[one.kind])
        for spec in found.values():
            drawn = render.svg(spec)
            assert drawn.startswith("<svg") and spec["title"]["text"] in drawn and "NaN" not in drawn
            assert render.png(spec).startswith(b"\x89PNG")


def test_one_page_of_everything(place, tmp_path):
    done = command_line("report", *files(place), "-o", tmp_path / "sub" / "report.html")
    assert (done.code, done.err) == (0, "") and done.out == f"wrote {tmp_path}/sub/report.html\n"
    text = (tmp_path / "sub" / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.charts) == len([t for t in page.tags if t[0] == "figure"]) == 13
    assert text.count("window.vegaEmbed=") == 1, "the bundle is in the page once"
    for said in (
        "complete: 1440 of 1440 samples", "1,024 = 4 micro × 2 accumulation × 128 data-parallel", "rank 0 exited with code 1",
        "Look at the log.", "ValueError: <b>bad</b>", "Time lost at boundaries", "Versions", "2.13.0", "--nodes",
        "CUDA out of memory", "An assumption.", "Ledger", "given", "derived", "node-hours (planned)",
        "Failure of launch 1; its last checkpoint is at sample 240",
    ):  # fmt: skip
        assert said in page.text, said
    headings = [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert headings.count("h1") == 1 and headings.count("h2") == 5
    assert all(attributes.get("scope") == "col" for tag, attributes in page.tags if tag == "th")
    figures = [a for t, a in page.tags if t == "div" and a.get("role") == "img"]
    assert len(figures) == 13 and all(re.search(r"\d", str(f["aria-label"])) for f in figures), "the text has numbers"
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "poster", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert not list(tmp_path.rglob("*.part"))


def test_a_hostile_name_stays_text(tmp_path):
    name = '<script>alert(1)</script> "& $(x) \u2028'
    root = material.run_directory(tmp_path / name.replace("/", "\u2215"), steps=20)
    plan = json.loads((root / "plan.json").read_text())
    plan["target"] = '</script><img src=x onerror="alert(2)">.py:task'
    plan["notes"] = ["<script>note</script>", "]]>-->"]
    (root / "plan.json").write_text(json.dumps(plan))
    probe = replace(material.probe(), target="</script><b>x", device="<i>cpu", notes=("<u>",))
    (tmp_path / "probe.json").write_text(json.dumps(probe.to_json()))
    out = tmp_path / "report.html"
    report = batchwright.report(root, tmp_path / "probe.json", output=out, markdown=tmp_path / "report.md")
    page = Page(out.read_text(encoding="utf-8"))
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert len(scripts) == 3 and not {"img", "b", "i", "u"} & {tag for tag, _ in page.tags}
    assert "<script>note</script>" in page.text and "onerror" in page.text
    assert "<script>" not in (tmp_path / "report.md").read_text() and "<img" not in (tmp_path / "report.md").read_text()
    assert report.files == (str(tmp_path / "report.md"), str(out))


def test_pictures_and_markdown(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command_line(
        "report", place / "probe.json", place / "probe.json", "--svg", "pictures", "--png", "pictures",
        "--markdown", "a/report.md", "--theme", "dark", "--json",
    )  # fmt: skip
    assert done.code == 0 and done.json["schema"] == 1
    names = sorted(os.listdir("pictures"))
    charts = ("throughput", "memory", "step-time")
    assert names == sorted(
        f"{kind}-{name}.{end}" for kind in ("probe", "probe-2") for name in charts for end in ("svg", "png")
    )
    assert not Path("report.html").exists(), "only what was asked for"
    text = Path("a/report.md").read_text(encoding="utf-8")
    for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (Path("a") / link).exists(), link
    assert text.count("![") == 6 and "| purpose |" in text
    assert "#14171c" in Path("pictures/probe-memory.svg").read_text(), "the dark theme"
    printed = command_line("report", place / "ramp.json", "--markdown")
    assert printed.code == 0 and printed.out.startswith("# batchwright report: ramp.json\n") and not printed.err
    assert "Batch size and nodes against samples: planned: 256 to 2,048" in printed.out


def test_without_arguments_the_folder_must_be_unambiguous(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command_line("report")
    assert done.code == 2 and "nothing to report" in done.err and "run directory" in done.err
    material.run_directory(tmp_path / "runs" / "one", steps=10)
    (tmp_path / "probe.json").write_text((place / "probe.json").read_text())
    (tmp_path / "other.json").write_text("{}")
    done = command_line("report", "--json")
    assert done.code == 0 and [one["kind"] for one in done.json["inputs"]] == ["run", "probe"]
    assert done.json["files"] == ["report.html"]
    (tmp_path / "probe2.json").write_text((place / "probe.json").read_text())
    done = command_line("report")
    assert done.code == 2 and "more than one probe: probe.json, probe2.json" in done.err
    monkeypatch.chdir(tmp_path / "runs" / "one")
    assert command_line("report", "--markdown").out.startswith("# batchwright report: one\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a JSON document"),
        ("[1]", "not a JSON document: no JSON object"),
        ("{}", "its keys are none"),
        ('{"a": 1}', "its keys are a"),
        ('{"error": {"message": "nodes=0 must be at least 1."}}', "it is an error that a verb printed: nodes=0"),
        ('{"state": "complete", "consumed_samples": 1, "directory": "/runs/x"}', "give the run directory, /runs/x"),
        ('{"ok": true, "findings": []}', "it is check --json"),
        ('{"trials": 3, "max_micro_batch_size": 1}', "looks like the output of probe --json, but it is damaged"),
        ('{"stages": [], "rule": "Linear", "total_steps": 1}', "stages is empty"),
        ('{"stages": [{"index": "x"}], "rule": "Linear", "total_steps": 1}', "damaged"),
        ('{"points": [{}], "lengths": []}', "damaged"),
    ],
)
def test_a_wrong_file_is_named_with_the_reason(tmp_path, content, said):
    (tmp_path / "x.json").write_text(content)
    done = command_line("report", tmp_path / "x.json", tmp_path / "missing.json")
    assert done.code == 2 and said in done.err and "missing.json: no such file" in done.err
    assert "a run directory, or the output of" in done.err


WRONG = st.sampled_from([None, -1, 0, 10**30, 1.5e308, "", "x", [], {}, True, [None], {"a": 1}, "\ud800"])


@given(st.data())
def test_a_document_with_any_wrong_value_is_reported_or_refused(data):
    document = data.draw(st.sampled_from(list(material.documents().values())))
    at, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(at[key], (dict, list)) and at[key] and data.draw(st.booleans()):
        at = at[key]
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
    if isinstance(at, dict) and data.draw(st.booleans()):
        del at[key]
    else:
        at[key] = data.draw(WRONG)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.json"
        path.write_text(json.dumps(document))
        try:
            made = batchwright.report(path, markdown="-")
            found = read_inputs([path])[0]
        except ConfigError as error:
            assert str(path) in str(error)
            return
    assert made.markdown
    for spec in charts_of(found.kind, found.document).values():
        json.dumps(spec, allow_nan=False)


def test_other_errors(place, tmp_path, monkeypatch):
    done = command_line("report", tmp_path)
    assert done.code == 2 and "holds no run" in done.err
    done = command_line("report", place / "ramp.json", "--theme", "blue", "-o", tmp_path / "x.html")
    assert done.code == 2 and "must be one of light, dark, auto" in done.err
    done = command_line("report", "--markdown", place / "train")
    assert done.code == 2 and "is a directory" in done.err
    done = command_line("report", place / "ramp.json", "-o", "/proc/nothing/x.html")
    assert done.code == 4 and "cannot be written" in done.err
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = command_line("report", place / "ramp.json", "-o", tmp_path / "x.html")
    assert done.code == 4 and "pip install 'batchwright[report]'" in done.err and not (tmp_path / "x.html").exists()
    assert command_line("report", place / "ramp.json", "--markdown").code == 0, "Markdown needs no extra"
    with pytest.raises(MissingExtraError):
        render.png({})


def test_a_failed_write_keeps_the_old_report(place, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("old")
    monkeypatch.setattr("batchwright.report.write.page", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError):
        batchwright.report(place / "ramp.json", output=out)
    assert out.read_text() == "old"


def test_damaged_and_half_written_events_are_left_out_and_counted(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=50)
    path = root / "events" / "launch-00003.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b'{"kind": "step", "samples": "many"}\n'
    lines[5] = b"\xff\xfe broken\n"
    lines[6] = b'{"kind": "step", "samples": NaN, "loss": 1}\n'
    lines[7] = b'{"kind": "step", "samples": 1e400, "loss": [1], "launch": {}, "time": "x", "stage": 1e300}\n'
    path.write_bytes(b"".join(lines) + b'{"kind": "step", "sam')
    (root / "events" / "launch-00002.jsonl").unlink()
    (root / "events" / "launch-00002.jsonl").mkdir()
    done = command_line("report", root, "-o", tmp_path / "report.html", "--json")
    assert done.code == 0
    assert done.json["skipped"] == {f"{root}/launch-00003.jsonl": 4, f"{root}/launch-00002.jsonl": 1}
    text = Page((tmp_path / "report.html").read_text()).text
    assert "4 lines were skipped" in text and "1 line was skipped" in text
    assert "loss" in " ".join(done.json["charts"])


@pytest.mark.parametrize("kept", ["plan.json", "launches", "events", "checkpoints"])
def test_a_run_that_has_only_some_of_its_files(tmp_path, kept):
    root = material.run_directory(tmp_path / "run", steps=20)
    for name in ("launches", "events", "checkpoints"):
        if name != kept:
            (root / name).rename(tmp_path / name)
    done = command_line("report", root, "-o", tmp_path / "report.html")
    assert done.code == 0, done.err


def test_a_launch_without_an_ending_counts_up_to_its_last_event(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=50)
    (root / "launches" / "0003" / "ending.json").unlink()
    history = read_inputs([root])[0].document["history"]
    assert history[2]["outcome"] is None and history[2]["position"] == 1200
    assert history[2]["seconds"] == pytest.approx(5 + 50 * 0.1, abs=0.01)


def test_a_run_of_a_command_has_no_steps_and_no_ledger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ["sh", "-c", "echo {end_sample} > {status_file}"]
    made = batchwright.run(
        script,
        thresholds="0:8 64:16",
        samples=128,
        micro_batch_size=8,
        nodes=1,
        devices_per_node=1,
        dir="run",
        progress=False,
    )
    report = batchwright.report("run", markdown="-")
    assert made.state == "complete" and report.charts == ("run-staircase", "run-node-hours")
    assert "A command keeps no ledger." in report.markdown


def test_columns_are_the_steps_of_the_lineage(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=50)
    events = [event for event in read_events(root) if event["kind"] == "step"]
    columns = read_columns(root).steps
    assert set(columns) == set(COLUMNS)
    for name in ("samples", "loss", "time", "launch", "stage"):
        assert list(columns[name]) == [event[name] for event in events]
    assert list(columns["samples"]) == sorted(set(columns["samples"])), "the step that was trained twice counts once"
    assert len(columns["step"]) == 100


def test_a_report_of_100_000_steps_is_small_and_keeps_its_extremes(tmp_path):
    root = material.run_directory(
        tmp_path / "run", steps=50_000, losses={12_345: 99.5, 70_001: "nan", 88_888: -4.5}, failed=False
    )
    batchwright.report(root, output=tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert sum(len(json.dumps(spec)) for spec in page.charts.values()) < 1_000_000
    for name in ("1-loss", "1-loss-by-time"):
        spec = page.charts[name]
        bands = [row for view in spec["layer"] if view["mark"]["type"] == "area" for row in view["data"]["values"]]
        assert max(row["high"] for row in bands) == 99.5 and min(row["low"] for row in bands) == -4.5
        assert "not finite in 1" in spec["description"]


def test_reading_a_run_loads_no_torch(place, tmp_path):
    code = (
        "import sys, batchwright\n"
        f"batchwright.report({str(place / 'train')!r}, {str(place / 'probe.json')!r}, output={str(tmp_path / 'x.html')!r})\n"
        "assert not {'torch', 'jax', 'pandas', 'plotext'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_verb_can_be_called_before_and_after_its_package_is_imported(place, tmp_path):
    import batchwright.report.charts

    made = batchwright.report(
        batchwright.ramp(global_batch_size=8, samples=80), material.probe(), output=tmp_path / "x.html"
    )
    assert made.charts == ("ramp-staircase", "probe-throughput", "probe-memory", "probe-step-time")
    with pytest.raises(ConfigError):
        batchwright.report(tmp_path / "nothing")


def test_the_rest_of_a_ramp_and_long_lists_say_what_is_left_out(tmp_path):
    made = batchwright.ramp(thresholds="0:8 1600:16", samples=4800, start_sample=1600).to_json()
    (tmp_path / "ramp.json").write_text(json.dumps(made))
    text = batchwright.report(str(tmp_path / "ramp.json"), markdown="-").markdown
    assert "in 1 stage; from sample 1600 on: 200 steps, 3200 samples (the whole ramp: 400 steps, 4800 samples)" in text
    run = history(RunDirectory(material.run_directory(tmp_path / "run", steps=10)))
    findings = [{"cause": "gap", "message": f"finding {i}"} for i in range(23)]
    ledger = {"ok": False, "gaps": 23, "repeats": 0, "findings": findings}
    long = {**run, "failures": run["failures"] * 25, "ledger": ledger}
    blocks = {block.title: block for block in section("run", long, "run", "light").blocks}
    assert blocks["Earlier failures"].lines == ("5 more.",) and blocks["Ledger"].lines[-1] == "3 more."
