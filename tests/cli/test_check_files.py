"""`batchwright check CONFIG`: configurations of several files, and values that only the run knows."""

from __future__ import annotations

import pytest

HF = "output_dir: x\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\n"
AXOLOTL = "base_model: m\nsequence_len: 2048\nmicro_batch_size: 4\ngradient_accumulation_steps: 8\n"
FACTORY = HF + "stage: sft\ntemplate: llama3\ncutoff_len: 2048\n"
DEEPSPEED = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'


@pytest.mark.parametrize(
    ("host", "title"), [(HF, "Hugging Face"), (AXOLOTL, "Axolotl"), (FACTORY, "LLaMA-Factory")], ids=lambda one: one[:9]
)
@pytest.mark.parametrize("inline", [True, False])
def test_a_configuration_of_deepspeed_must_agree_with_the_one_that_names_it(cli, tmp_path, host, title, inline):
    file = tmp_path / "train.yaml"
    (tmp_path / "ds.json").write_text(DEEPSPEED)
    file.write_text(host + (f"deepspeed: {DEEPSPEED}\n" if inline else "deepspeed: ds.json\n"))
    ran = cli("check", str(file), "--devices", "8")
    assert ran.code == 5 and ran.out.startswith(f"not ok: 1 error: {title} ")
    assert "two different values" in " ".join(ran.out.split())
    (tmp_path / "ds.json").write_text(DEEPSPEED.replace("2,", "4,"))
    if not inline:
        assert cli("check", str(file), "--devices", "8").code == 0
