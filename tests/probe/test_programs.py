"""Programs of other people, probed as commands under a real limit of memory: nothing in them is ours or for us."""

from __future__ import annotations

import json
import random
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from batchwright.cli import main
from batchwright.probe import probe
from tests.needs import needs

pytestmark = pytest.mark.torch
CLM, LIT = (Path(__file__).with_name(name) for name in ("clm.py", "lit.py"))
# Activations are large beside the weights: a probe then needs a few seconds of computing.
LLAMA = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration, a tokenizer of bytes and lines of text; the programs find no network, and one thread."""
    needs("datasets")
    needs("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "<eos>"])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    tokenizer.save(str(model / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>"}
    (model / "tokenizer_config.json").write_text(json.dumps(special))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512, **LLAMA}
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 256, "pad_token_id": 256}))
    drawn = random.Random(0)
    lines = (json.dumps({"text": "".join(drawn.choices("abcdefgh ", k=300))}) for _ in range(2000))
    (data / "train.jsonl").write_text("\n".join(lines))
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def probed(capsys: pytest.CaptureFixture[str], options: list[str], command: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as done:
        main(["probe", "--json", "--timeout", "1800", *options, "--", sys.executable, *command])
    out, err = capsys.readouterr()
    assert done.value.code == 0, err
    print(err)
    return json.loads(out)


def check(capsys: pytest.CaptureFixture[str], options: list[str], command: list[str]) -> dict[str, Any]:
    """Probe a command twice: the second time everything is in the journal."""
    made = probed(capsys, options, command)
    largest, failing = made["max_micro_batch_size"], made["first_failing_micro_batch_size"]
    limits = [t for t in made["trials"] if t["purpose"] == "limit"]
    print([(t["micro_batch_size"], t["status"], t["peak_memory_bytes"]) for t in limits])
    assert failing is not None and {t["cause"] for t in limits if t["status"] != "fits"} == {"host-oom"}
    assert len(limits) <= 8
    timed = [t for t in made["trials"] if t["purpose"] == "throughput"]
    assert timed[-1]["micro_batch_size"] == largest and all(t["samples_per_second"] > 0 for t in timed)
    assert made["recommended_micro_batch_size"] in {t["micro_batch_size"] for t in timed}
    again = probed(capsys, options, command)
    assert all(t["resumed"] for t in again["trials"]) and len(again["trials"]) == len(made["trials"])
    return made


def training(batch: str = "{micro_batch_size}") -> list[str]:
    """What both programs are told. They train for longer than a trial, and write into a folder."""
    flags = {"per_device_train_batch_size": batch, "max_steps": 1000, "output_dir": "out", "report_to": "none"}
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + ["--use_cpu"]


@pytest.mark.rounds
def test_sft_of_trl(capsys, folder):
    """The script that `trl sft` runs, from its package."""
    needs("trl")
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    found = find_spec("trl")
    assert found is not None and found.origin is not None
    script = str(Path(found.origin).parent / "scripts" / "sft.py")
    command = [script, "--model_name_or_path", "model", "--dataset_name", "data", "--max_length", "256", *training()]
    made = check(capsys, ["--memory", "3GiB", "--multiple-of", "4", "--seconds", "0.2"], [*command, "--bf16", "false"])
    assert made["max_micro_batch_size"] % 4 == 0


@pytest.mark.rounds
def test_lightning_with_its_default_bar(monkeypatch):
    """Rich draws it, and into a pipe only if it is told to."""
    needs("lightning")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, str(LIT), "--batch-size", "{micro_batch_size}"]
    made = probe(command, max=2, seconds=0.2, dir=None, timeout=1800)
    timed = [t for t in made.trials if t.purpose == "throughput"]
    assert [t.micro_batch_size for t in timed] == [1, 2] and all(t.samples_per_second for t in timed), made.notes


@pytest.mark.rounds
def test_a_script_with_grouped_texts_and_the_trainer(capsys, folder):
    script = shutil.copy(CLM, folder)  # in a folder of its own: files beside a script are its code
    files = ["--config_name", "model", "--tokenizer_name", "model", "--train_file", "data/train.jsonl"]
    made = check(
        capsys, ["--memory", "3GiB", "--seconds", "0.2"], [script, *files, "--logging_steps", "1", *training()]
    )
    largest, failing = made["max_micro_batch_size"], made["first_failing_micro_batch_size"]
    assert largest < failing <= max(largest + 1, largest * 1.01)
