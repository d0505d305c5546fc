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
from urllib.parse import unquote

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
from batchwright.rundir import names
from batchwright.rundir.events import COLUMNS, last_step, read_columns, read_events, read_rounds
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
    material.rl_directory(folder / "grpo")
    return folder


def files(place: Path) -> list[str]:
    kinds = ("plan", "ramp", "probe", "estimate")
    return [str(place / "train"), str(place / "grpo"), *(str(place / f"{kind}.json") for kind in kinds)]


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
    assert len(page.charts) == len([t for t in page.tags if t[0] == "figure"]) == 15
    assert text.count("window.vegaEmbed=") == 1, "the bundle is in the page once"
    for said in (
        "complete: 1440 of 1440 samples", "1,024 = 4 micro × 2 accumulation × 128 data-parallel", "rank 0 exited with code 1",
        "Look at the log.", "ValueError: <b>bad</b>", "Time lost at boundaries", "Versions", "2.13.0", "--nodes",
        "CUDA out of memory", "An assumption.", "Ledger", "given", "derived", "node-hours (planned)",
        "Failure of launch 1; its last checkpoint is at sample 240",
    ):  # fmt: skip
        assert said in page.text, said
    headings = [tag for tag, _ in page.tags if tag in ("h1", "h2", "h3")]
    assert headings.count("h1") == 1 and headings.count("h2") == 6
    assert all(attributes.get("scope") == "col" for tag, attributes in page.tags if tag == "th")
    figures = [a for t, a in page.tags if t == "div" and a.get("role") == "img"]
    assert len(figures) == 15 and all(re.search(r"\d", str(f["aria-label"])) for f in figures), "the text has numbers"
    for tag, attributes in page.tags:
        for name in ("src", "href", "action", "poster", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), (tag, attributes)
    assert not list(tmp_path.rglob("*.part"))


def test_a_probe_of_a_pipeline_is_a_table(place):
    made = batchwright.report(place / "pipeline.json", markdown="-").markdown
    assert "fastest: 8 microbatches; plan chooses 2" in made and "predicted idle share" in made and "a note" in made


def test_a_probe_is_in_the_stack_of_the_estimate_of_the_same_task_and_of_no_other(tmp_path):
    probe, estimate = material.probe(ranks=1), material.estimate()
    said = "measured 6.00 GiB at 32"
    assert said in batchwright.report(estimate, probe, markdown="-").markdown
    others = [replace(probe, target="other.py:task"), replace(probe, ranks=2)]
    assert said not in batchwright.report(estimate, *others, markdown="-").markdown
    for change in ({"precision": "bf16"}, {"checkpoint_activations": True}, {"model": "llama"}):
        assert said not in batchwright.report(replace(estimate, **change), probe, markdown="-").markdown
    elsewhere = replace(probe, target="/home/me/train.py:task")
    text = batchwright.report(elsewhere, estimate, markdown="-").markdown
    assert f"{said} (probe of /home/me/train.py:task)" in text, "a path that is not absolute may be this one"
    absolute = replace(estimate, task="/home/you/train.py:task")
    assert said not in batchwright.report(elsewhere, absolute, markdown="-").markdown
    assert (
        said
        in batchwright.report(elsewhere, replace(absolute, task="/home/me/../me/train.py:task"), markdown="-").markdown
    )
    wide = replace(probe, identity={**probe.identity, "args": {"width": "256"}})
    assert said not in batchwright.report(wide, estimate, markdown="-").markdown
    assert said not in batchwright.report(probe, replace(estimate, args={"width": "512"}), markdown="-").markdown
    assert said in batchwright.report(wide, replace(estimate, args={"width": "256"}), markdown="-").markdown
    long = replace(estimate, points=tuple(replace(point, sequence_length=512) for point in estimate.points))
    assert said not in batchwright.report(probe, long, markdown="-").markdown, "the task's own length is another one"
    measured = replace(probe, identity={"args": {"sequence_length": "512"}})
    assert said in batchwright.report(measured, long, markdown="-").markdown


def test_an_estimate_says_whether_its_chart_has_something_measured():
    alone = replace(material.estimate(), calibration=None)
    both = "The sizes in the table are predicted; the chart also shows what was measured."
    only = "All sizes are predicted, not measured."
    for sources, said, other in (
        ([alone], only, both),
        ([material.estimate()], both, only),
        ([alone, material.probe(ranks=1)], both, only),
        ([alone, material.probe(ranks=2)], only, both),
    ):
        text = batchwright.report(*sources, markdown="-").markdown
        assert said in text and other not in text


def test_every_report_ends_with_the_version(place, tmp_path):
    for kind in ("plan", "ramp", "pipeline", "estimate"):
        made = batchwright.report(place / f"{kind}.json", output=tmp_path / "x.html", markdown="-")
        assert made.markdown.endswith(f"Made by batchwright report, version {batchwright.__version__}.\n")
        page = Page((tmp_path / "x.html").read_text(encoding="utf-8")).text
        assert f"Made by batchwright report, version {batchwright.__version__}." in page


def test_links_to_pictures_lead_to_them_from_any_folder(place, tmp_path):
    for name in ("100%41", "a b (c) #1?x", "ü&<"):
        folder = tmp_path / name
        batchwright.report(place / "ramp.json", svg=folder, markdown=tmp_path / "report.md")
        (link,) = re.findall(r"!\[[^\]]*\]\((\S+)\)\n", (tmp_path / "report.md").read_text(encoding="utf-8"))
        assert (tmp_path / unquote(link)).samefile(folder / "ramp-staircase.svg"), link
        assert re.fullmatch(r"[A-Za-z0-9%/._~-]+", link)


def test_a_column_of_reasons_that_begin_with_a_number_wraps():
    from batchwright.report.html import page
    from batchwright.report.sections import Section, Table

    table = Table("t", ("value", "reason"), (("2", "1024 / (4 × 64)"), ("1,024", "4 ranks × 8 devices")))
    cells = [a["class"] for tag, a in Page(page("t", [Section("plan", "p", "", (), {}, (table,))])).tags if tag == "td"]
    assert cells == ["number", "text"] * 2


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
    assert "a run directory (of run or train_rl), or the output of" in done.err


def test_a_file_whose_name_is_blank_is_quoted():
    assert command_line("report", "\t", "--markdown").err.startswith(r"error: '\t': no such file")


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
    done = command_line("report", place)
    assert (
        done.code == 2 and f"is not a run directory. It holds these: {place / 'grpo'}, {place / 'train'}." in done.err
    )
    for flag in ("--png", "--svg"):
        done = command_line("report", place / "train", flag, place / "ramp.json")
        assert done.code == 2 and f"error: {flag}=" in done.err and "is a file, and a directory is needed" in done.err
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

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("batchwright.rundir.atomic.os.replace", full)
    done = command_line("report", place / "ramp.json", "-o", out)
    assert done.code == 4 and "report.html cannot be written: No space left on device" in done.err
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["report.html"], "no part of the new one is left"


@pytest.mark.parametrize("field", ["output", "markdown", "png", "svg"])
@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(place, field, name):
    with pytest.raises(ConfigError, match="not a usable path"):
        batchwright.report(place / "probe.json", **{field: name})


def test_a_report_does_not_replace_what_it_is_made_of(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    probe = tmp_path / "probe.json"
    material.run_directory(tmp_path / "run", steps=10)
    material.rl_directory(tmp_path / "rl")
    probe.write_text((place / "probe.json").read_text())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments, said in {
        ("--markdown", "probe.json"): "--markdown='probe.json' is a JSON document",
        ("probe.json", "-o", tmp_path / "." / "probe.json"): "the report is made of this file",
        ("probe.json", "-o", "-"): "--output='-': a page is written to a file",
        ("run", "-o", "run/plan.json"): "in a run directory a report must end with .html or .md",
        ("run", "--markdown", "run/stop.json.txt"): "in a run directory",
        ("rl", "-o", "rl/events/launch-00001.jsonl"): "in a run directory",
    }.items():
        done = command_line("report", *arguments)
        assert done.code == 2 and said in done.err, (arguments, done.err)
    for output in ("output", "markdown"):
        with pytest.raises(ConfigError, match="made of this file"):
            batchwright.report(probe, **{output: probe})
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):  # an older report is replaced
        done = command_line("report", "run", "probe.json", "-o", "run/report.html", "--markdown", "run/report.md")
        assert done.code == 0, done.err
    linked = tmp_path / "link.html"
    linked.symlink_to(probe)
    assert command_line("report", "probe.json", "-o", linked).code == 2, "the link leads to the input"


@pytest.mark.parametrize("source", [None, {"a": 1}, 3, ["probe.json"]])
def test_a_source_that_is_no_result_and_no_path_is_refused(source):
    with pytest.raises(ConfigError, match=f"is a {type(source).__name__}, not a result or a path") as refused:
        batchwright.report(source)
    assert "A report takes a run directory" in str(refused.value)


def test_a_theme_that_is_no_text_is_refused(place):
    with pytest.raises(ConfigError, match="theme=None must be one of light, dark, auto"):
        batchwright.report(place / "ramp.json", markdown="-", theme=None)


def test_a_probe_of_a_pipeline_is_reported_from_its_object(place):
    (file,) = read_inputs([place / "pipeline.json"])
    (given,) = read_inputs([material.pipeline()])
    assert (given.kind, given.document) == ("pipeline", file.document)
    assert material.pipeline().chart() is None and "text/html" in material.pipeline()._repr_mimebundle_()


def test_the_rounds_of_a_run_of_reinforcement_learning_are_those_that_led_to_its_newest_state(tmp_path):
    """Launch 2 begins at sample 8, so two of three rounds are discarded; each file has damaged lines."""
    root = material.rl_directory(tmp_path / "rl")
    first, second = (root / "events" / f"launch-0000{n}.jsonl" for n in (1, 2))
    first.write_text(first.read_text() + '{"kind": "round", "rou')
    rollouts = [{"kind": "rollout", "samples": 8, "discarded_responses": n} for n in (6, "nan", "inf", None, "x", 2)]
    material.write_lines(
        second, [{"kind": "launch", "samples": 8, "launch": 2}, *rollouts, {"kind": "rollout_replaced"}]
    )
    found = read_rounds(root)
    assert found["rounds"]["samples"] == [8.0] and found["rounds"]["round"] == [0.0] and found["last"]["round"] == 0
    assert (found["discarded_responses"], found["replaced_workers"]) == (8, 1)
    assert found["skipped"] == {"launch-00001.jsonl": 1}
    done = command_line("report", root, "-o", tmp_path / "report.html", "--json")
    assert done.code == 0 and done.json["skipped"] == {f"{root}/launch-00001.jsonl": 1}
    assert done.json["charts"] == ["rl-round", "rl-reward"]
    text = Page((tmp_path / "report.html").read_text()).text
    assert "1 round, 8 prompts" in text and "launch-00001.jsonl: 1 line was skipped" in text
    assert "round 1 took 2 s" in text, "the last round that counts"
    material.write_lines(
        second, [{"kind": "launch", "samples": 8}, material.round_event(1, 16, seconds=9.0), {"kind": "step"}]
    )
    assert read_rounds(root)["last"]["seconds"] == 9.0
    material.write_lines(second, [{"kind": "round", "samples": 24, "spans": 3}])
    assert command_line("report", root, "--markdown").code == 0, "a damaged last round"


def test_a_run_of_reinforcement_learning_is_found_without_arguments(tmp_path, monkeypatch):
    material.rl_directory(tmp_path / "runs" / "grpo")
    (tmp_path / "runs" / "notes").mkdir()
    monkeypatch.chdir(tmp_path)
    found = command_line("report", "--markdown")
    assert found.code == 0 and found.out.startswith("# batchwright report: grpo\n"), found.err
    done = command_line("report", "runs")
    assert done.code == 2 and "It holds these: runs/grpo." in done.err
    monkeypatch.chdir(tmp_path / "runs" / "grpo")
    assert command_line("report", "--markdown").out == found.out
    material.run_directory(tmp_path / "runs" / "train", steps=10)
    monkeypatch.chdir(tmp_path)
    done = command_line("report")
    assert done.code == 2 and "more than one run: runs/grpo, runs/train" in done.err


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


def test_the_last_step_of_earlier_launches_is_found_at_the_ends_of_their_files(tmp_path):
    """Launch 1 went further than launch 2, whose file is damaged at its end; launch 3 is the one that asks."""
    events = tmp_path / "events"
    long = [material.step_event(i, 8 * i + 8, 8, 0, 1, 0.0, 2.0) for i in range(2000)]
    material.write_lines(events / "launch-00001.jsonl", long)
    material.write_lines(events / "launch-00002.jsonl", long[:5])
    with open(events / "launch-00002.jsonl", "a") as file:
        file.write('{"kind": "step", "step": "x"}\n{"kind": "step", "step": true}\n{"kind": "step", "step": 9999')
    material.write_lines(events / "launch-00003.jsonl", [material.step_event(5000, 8, 8, 0, 3, 0.0, 2.0)])
    assert [last_step(tmp_path, before=n) for n in (1, 2, 3, 4)] == [-1, 1999, 1999, 5000]
    assert (events / "launch-00001.jsonl").stat().st_size > 2 * 2**17, "only the end is read"
    (events / "launch-00001.jsonl").unlink()
    assert last_step(tmp_path, before=3) == 4


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


def test_who_has_read_is_in_the_report(tmp_path):
    root = material.run_directory(tmp_path / "run", steps=10)
    read = {
        "readers": 1,
        "hosts": 2,
        "loading_hosts": 1,
        "rows_read": 48,
        "rows_trained": 40,
        "read_amplification": 1.2,
    }
    for number, loading in (
        (2, read | {"wait_seconds": 0.5}),
        (3, read | {"readers": 2, "hosts": None, "loading_hosts": None, "wait_seconds": 3.0}),
    ):
        path = root / names.status(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"loading": loading}))
    run = history(RunDirectory(root))
    blocks = {block.title: block for block in section("run", run, "run", "light").blocks}
    assert blocks["Reading"].rows == (
        ("2", "1 of 2 hosts", "48", "48", "1.20", "0.5 s"),
        ("3", "every rank", "48", "24", "1.20", "3.0 s"),
    )
    assert "| 2 | 1 of 2 hosts | 48 | 48 | 1.20 | 0.5 s |" in batchwright.report(str(root), markdown="-").markdown
