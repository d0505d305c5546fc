"""Keys set in the text of a file: everything else stays, or the edit is refused."""

from __future__ import annotations

import json
import time
import tomllib

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.core.errors import ConfigError
from batchwright.dialects import flatten
from batchwright.dialects.editing import edited, nested, written
from tests.examples import many

YAML = """\
# the head
trainer:            # a section
  devices: 8        # per node
  num_nodes: 2

  # before the strategy
  strategy: {tensor_model_parallel_size: 1, name: 'x'}
data:
    micro_batch_size: 4   # four spaces
    list:
    - 1
    - 2
# the foot
model.flat: 3
"""


def test_comments_order_and_indents_survive():
    keys = {
        "trainer.devices": 4,
        "trainer.strategy.tensor_model_parallel_size": 2,
        "trainer.strategy.context_parallel_size": 2,
        "trainer.max_steps": 100,
        "data.global_batch_size": 512,
        "data.rampup_batch_size": [32, 8, 9384],
        "model.flat": 5,
        "new.section.key": "a: b",
    }
    assert (
        edited(YAML, "yaml", keys)
        == """\
# the head
trainer:            # a section
  devices: 4        # per node
  num_nodes: 2

  # before the strategy
  strategy: {tensor_model_parallel_size: 2, name: 'x', context_parallel_size: 2}
  max_steps: 100
data:
    micro_batch_size: 4   # four spaces
    list:
    - 1
    - 2
    global_batch_size: 512
    rampup_batch_size: [32, 8, 9384]
# the foot
model.flat: 5
new:
  section:
    key: 'a: b'
"""
    )


TOML = """\
# head
name = "x"
[training]      # section
local_batch_size = 8   # per rank
seq_len = 2048

[parallelism]
tensor_parallel_degree = 1
"""


def test_toml_keeps_its_comments():
    keys = {"training.local_batch_size": 4, "training.global_batch_size": 64, "checkpoint.interval": 10, "title": "y"}
    assert (
        edited(TOML, "toml", keys)
        == """\
# head
name = "x"
title = "y"
[training]      # section
local_batch_size = 4   # per rank
seq_len = 2048
global_batch_size = 64

[parallelism]
tensor_parallel_degree = 1

[checkpoint]
interval = 10
"""
    )


@pytest.mark.parametrize(
    ("text", "made"),
    [
        # Only what is set changes: order, indents, spaces, the spelling of numbers, escapes and the last line end stay.
        (
            '{\n    "b": 1,\n    "lr": 1.0e-05,\n    "a": {"c": 2},\n    "x": "\\u00e9"\n}',
            '{\n    "b": 4,\n    "lr": 1.0e-05,\n    "a": {"c": 2, "d": 3},\n'
            '    "x": "\\u00e9",\n    "s": {\n        "t": 5\n    }\n}',
        ),
        (
            '{\n\t"a": {\n\t\t"c" : 2\n\t}\n}\n',
            '{\n\t"a": {\n\t\t"c" : 2,\n\t\t"d" : 3\n\t},\n\t"b": 4,\n\t"s": {\n\t\t"t": 5\n\t}\n}\n',
        ),
        ('{"a":{},"b":0}', '{"a":{"d": 3},"b":4,"s":{"t": 5}}'),
        ("{ }", '{"a": {"d": 3}, "b": 4, "s": {"t": 5} }'),
        ("", '{"a": {"d": 3}, "b": 4, "s": {"t": 5}}'),
    ],
)
def test_json_is_changed_only_where_a_key_is_set(text, made):
    assert edited(text, "json", {"a.d": 3, "b": 4, "s.t": 5}) == made


def test_two_keys_of_one_new_section_and_its_parent():
    made = edited("a:\n  b:\n    c: 1", "yaml", {"a.b.d": 2, "a.e": 3, "f": 4, "g.h": 5, "g.i": 6, "a.b.c": 7})
    assert made == "a:\n  b:\n    c: 7\n    d: 2\n  e: 3\nf: 4\ng:\n  h: 5\n  i: 6\n"


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("a: &x 1\nb: *x\n", {"a": 2}),  # the anchor would be lost
        ("a: [1, 2]\n", {"a.b": 2}),
        ("a: text\n", {"a.b": 2}),
        ("- 1\n- 2\n", {"a": 2}),
    ],
)
def test_an_edit_that_would_change_more_is_refused(text, keys):
    with pytest.raises(ConfigError):
        edited(text, "yaml", keys)


words = st.text("abcdefgh_", min_size=1, max_size=6).map(lambda word: f"k{word}")
leaves = st.one_of(
    st.integers(-99, 10**6), st.booleans(), st.text("ab :#'\"-[]{},\n", max_size=8), st.floats(-5, 5).map(float)
)
values = st.one_of(leaves, st.lists(st.integers(0, 99), max_size=3))
trees = st.recursive(
    st.dictionaries(words, values, min_size=1, max_size=4),
    lambda inner: st.dictionaries(words, st.one_of(values, inner), min_size=1, max_size=4),
    max_leaves=8,
)
READ = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}


@settings(deadline=None, max_examples=many(200))
@given(
    trees,
    st.dictionaries(st.lists(words, min_size=1, max_size=3).map(".".join), values, min_size=1, max_size=3),
    st.data(),
)
def test_an_edit_sets_its_keys_and_nothing_else(tree, keys, data):
    form = data.draw(st.sampled_from(["yaml", "json", "toml"]))
    flow = data.draw(st.sampled_from([None, True, False]))
    if form == "json":
        text = json.dumps(tree, indent=2)
    elif form == "toml":
        text = written(flatten(tree), "toml")
    else:
        text = yaml.safe_dump(tree, default_flow_style=flow, sort_keys=False)
    try:
        made = edited(text, form, keys)
    except ConfigError:
        # Only where a key is a value and a section, in the file or in the keys.
        paths = [tuple(key.split(".")) for key in (*flatten(tree), *keys)]
        sections = any(a != b and b[: len(a)] == a for a in paths for b in paths)
        assert sections
        return
    assert flatten(READ[form](made)) == flatten(tree) | keys


@settings(deadline=None, max_examples=many(100))
@given(
    st.dictionaries(
        st.lists(words, min_size=1, max_size=3).map(".".join), st.one_of(st.integers(0, 9), st.booleans()), max_size=5
    )
)
def test_what_is_written_reads_back(keys):
    paths = [tuple(key.split(".")) for key in keys]
    if any(a != b and b[: len(a)] == a for a in paths for b in paths):
        return  # a key that is a section, too
    for form, read in READ.items():
        assert (read(written(keys, form)) or {}) == nested(keys)


@pytest.mark.parametrize("text", ["x = '" + " " * 200_000 + "y'\n", 'x = """\n[a' + " " * 200_000 + 'b\n"""\n'])
def test_long_lines_of_toml_take_little_time(text):
    begun = time.process_time()
    assert edited(text, "toml", {"a.b": 1}) == f"{text}\n[a]\nb = 1\n"
    assert time.process_time() - begun < 1  # CPU time; with backtracking, minutes


@pytest.mark.parametrize("indent", ["", "  "])
def test_a_list_of_lines_becomes_another_value(indent):
    text = f"a:\n  k:\n  {indent}- 0\n  {indent}- 1\n  b: 1\nc: 2\n"
    assert yaml.safe_load(edited(text, "yaml", {"a.k": 5, "c": 3})) == {"a": {"k": 5, "b": 1}, "c": 3}
    assert yaml.safe_load(edited("k:\n- 0\n", "yaml", {"k": [1, 2]})) == {"k": [1, 2]}


def test_a_file_is_composed_once_for_all_keys(monkeypatch):
    composed = []
    compose = yaml.compose
    monkeypatch.setattr(yaml, "compose", lambda *given: composed.append(1) or compose(*given))
    edited("a: 1\nb: {c: 2}\n", "yaml", {"a": 3, "b.c": 4, "b.d": 5, "e.f": 6})
    assert len(composed) == 1
