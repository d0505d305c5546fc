"""Any script with {micro_batch_size} in it, timed by marker, regex or two step counts; without torch."""

from __future__ import annotations

import sys

import pytest

from batchwright.core.errors import ConfigError, EnvironmentFault, NothingFitsError, RunError
from batchwright.probe import probe
from batchwright.probe.command import CommandRunner, _Steps
from batchwright.probe.machine import trial_environment
from batchwright.probe.records import read_request

SCRIPT = """
import sys, time
size, steps, style, limit = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if size > limit:
    if style == "crash":
        raise KeyError("not memory")
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
for step in range(steps):
    time.sleep((0.04 if style == "none" else 0.01) + 0.001 * size)
    if style == "marker":
        print(f"batchwright: step {step}")
    if style == "regex":
        print(f"epoch 0 | batch {step} | loss 1.0")
    if style == "tqdm":
        print(f" 10%|# | {step}/{steps} [00:01<00:10, 1.0it/s]", end="\\r", file=sys.stderr)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return lambda *arguments: [sys.executable, "-S", str(path), *arguments]


@pytest.mark.parametrize(
    ("style", "steps", "options"),
    [
        ("marker", "100000", {}),
        ("tqdm", "100000", {}),
        ("regex", "100000", {"step_regex": r"batch (\d+)"}),
        ("none", "{steps}", {}),
    ],
)
def test_limit_and_throughput(script, tmp_path, monkeypatch, style, steps, options):
    monkeypatch.setattr("batchwright.probe.command._BARE_SECONDS", 0.05)
    made = probe(
        script("{micro_batch_size}", steps, style, "5"), dir=tmp_path / "j", seconds=0.1, timeout=60, **options
    )
    assert (made.max_micro_batch_size, made.first_failing_micro_batch_size) == (5, 6)
    assert {t.cause for t in made.trials if not t.fits} == {"device-oom"}
    timed = [t for t in made.trials if t.purpose == "throughput"]
    assert [t.micro_batch_size for t in timed] == [1, 2, 4, 5]
    if style != "none":  # two totals on a busy machine may differ by less than their noise
        assert all(t.step_seconds and t.step_seconds > 0.005 for t in timed)
    else:
        assert any(t.step_seconds for t in timed)


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        (["Loading checkpoint shards:  25%|##5  | 1/4 [00:01<00:01,  1.0it/s]"], []),
        (["Map:  10%|#    | 100/1000 [00:01<00:10, 100 examples/s]"], []),
        (["Step 1: tokenizing", "step 2"], []),
        (["  1%|#    | 1/100 [00:01<01:40,  1.0s/it]", "  2%|#    | 2/100 [00:02<01:40]"], [1, 2]),
        (["Step 3 | lr 0.1 | Loss 2.5"], [3]),
        (["step 3 train_loss=2.5", "step 4 | lm_loss: 2.4", "step 5 step_loss 2.3"], [3, 4, 5]),
        (["step 3 val_loss=2.5", "step 4: eval/loss 2.4", "step 5 lossless", "step 6 validation loss: 2.0"], []),
        (["iter 3: train_loss 2.5", "iter 4: lm_loss 2.4"], [3, 4]),
        (["Epoch 0: 3it [00:01, 2.5it/s, v_num=0]", "Epoch 0: 4it [00:02, 2.5it/s]"], [3, 4]),
        (["3it [00:01, 2.5it/s, loss=2.1]", "fold 2: 4it [00:02, 2.5it/s, train_loss=2.1]"], [3, 4]),
        (["3it [00:01, 2.5it/s]", "Loading: 4it [00:02, 2.5it/s]", "Validation: 5it [00:02, 2.5it/s, loss=1]"], []),
        (["fold: |   | 3/? [00:01<00:00, 2.5it/s, loss=2.1]", "fold: |   | 4/? [00:02<00:00, loss=2.1]"], [3, 4]),
        (["Loading: |   | 3/? [00:01<00:00, 2.5it/s]", "Validation: |   | 4/? [00:02<00:00, val_loss=2.1]"], []),
        (["\x1b[31mstep:  4  \x1b[32mloss:  8.1"], [4]),
        (
            ["100%|#####| 9/9 [00:01<00:00]", "batchwright: step 1", "100%|#####| 10/10 [", "batchwright: step 2"],
            [1, 2],
        ),
    ],
)
def test_what_is_a_step(lines, seen):
    steps = _Steps(None, least=3, seconds=0.0)
    for when, line in enumerate(lines):
        steps.see(line, float(when))
    assert steps.numbers == seen


NANOGPT = ["step 0: train loss 4.2874, val loss 4.2823"] + [
    f"iter {n}: loss 4.{90 - n}, time 99.11ms, mfu -100.00%" for n in range(8)
]
WORDS = [
    f"| epoch {epoch:3d} | {n:5d}/ 2983 batches | lr 20.00 | ms/batch 12.3 | loss  6.77 | ppl   871.16"
    for epoch in (1, 2)
    for n in (200, 400, 600)
]


@pytest.mark.parametrize(("lines", "numbers", "seconds"), [(NANOGPT, list(range(8)), 1.0), (WORDS, None, 1 / 200)])
def test_the_pattern_that_repeats_with_a_growing_number_is_the_step(lines, numbers, seconds):
    steps = _Steps(None, least=5, seconds=3.0)
    enough = [steps.see(line, float(when)) for when, line in enumerate(lines)]
    assert enough == sorted(enough) and enough[-1]  # once it is enough, it stays enough
    assert numbers is None or steps.numbers == numbers
    assert steps.timing().seconds == pytest.approx(seconds)


@pytest.mark.parametrize("regex", [r"it (\d+) L ([\d.]+)", r"it (\d+) (?:L) (\S+)"])
def test_a_step_regex_may_have_further_groups(regex):
    steps = _Steps(regex, least=5, seconds=0.0)
    assert [steps.see(f"it {n} L {1 / (n + 1):.3f}", float(n)) for n in range(6)][-1]
    assert steps.numbers == list(range(6))


def test_the_series_that_ends_a_trial_is_the_one_that_is_timed():
    """A progress bar before training is long and fast, but it is not a step."""
    steps = _Steps(None, least=5, seconds=2.0)
    for n in range(100):
        assert not steps.see(f"  {n}%|#  | {n}/100 [00:01<00:10]", n / 100)
    assert any(steps.see(f"step {n} loss 1.0", 10.0 + n) for n in range(6))
    assert steps.timing().seconds == pytest.approx(1.0)


def bar(n, of, loss=""):
    return f"  {100 * n // of}%|#  | {n}/{of} [00:01<00:10{loss}]"


def test_a_bar_without_a_description_counts_if_a_sign_of_training_is_beside_it():
    def enough(*lines):
        steps = _Steps(None, least=3, seconds=0.0)
        return [steps.see(line, when) for when, line in lines][-1]

    tenths = [(n / 10, bar(n, 20)) for n in range(1, 21)]
    assert not enough(*tenths), "it ended: that may be a preparation"
    assert not enough(*((2 * when, line) for when, line in tenths)), "a slower one, too"
    assert enough(*((5 * when, line) for when, line in tenths[:-1])), "it lasts"
    assert enough(*tenths[:5], (0.55, "{'loss': '5.498', 'epoch': '0.1'}"), *tenths[5:8])
    assert not enough(*tenths[:5], (0.55, "{'eval_loss': '5.498', 'epoch': '0.1'}"), *tenths[5:8])
    assert not enough((0.0, "initial loss 2.3"), *tenths[:8]), "before the bar"
    assert enough(*tenths, (2.1, bar(1, 20))), "the next epoch"
    assert not enough(*tenths, *((2 + n / 10, bar(n, 7)) for n in range(1, 8))), "a second preparation"


def test_a_size_that_fails_after_a_bar_of_its_preparation_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr("batchwright.probe.command._BARE_SECONDS", 600.0)  # however slow the machine is
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, time\nfor i in range(1, 21):\n"
        "    print(f' {5 * i}%|# | {i}/20 [00:01<00:01, 1it/s]', end='\\r', file=sys.stderr, flush=True)\n"
        "    time.sleep(0.01)\n"
        "if int(sys.argv[1]) > 5:\n    raise RuntimeError('CUDA out of memory')\n"
    )
    made = probe([sys.executable, "-S", str(path), "{micro_batch_size}"], dir=None, throughput=False)
    assert (made.max_micro_batch_size, made.first_failing_micro_batch_size) == (5, 6)


def test_batches_without_a_loss_are_not_steps():
    steps = _Steps(None, least=3, seconds=0.0)
    assert not any(steps.see(f"tokenized {n}/8 batches", float(n)) for n in range(8))
    assert not steps.see("9" * 10**6 + " batches", 9.0)


def test_a_number_that_is_too_long_is_not_a_step():
    steps = _Steps(None, least=3, seconds=0.0)
    for when in range(5):
        steps.see(f"step {'9' * 400}{when} loss 1", float(when))
    assert steps.numbers == [] and steps.timing() is None


def test_a_size_that_fails_after_its_bars_does_not_fit(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys\nfor i in range(5):\n"
        "    print(f'Loading checkpoint shards: 25%|# | {i}/4 [00:01<00:01, 1it/s]', flush=True)\n"
        "    print('step', i, flush=True)\n"
        "if int(sys.argv[1]) > 5:\n    raise RuntimeError('CUDA out of memory')\n"
    )
    made = probe([sys.executable, "-S", str(path), "{micro_batch_size}"], dir=None, throughput=False)
    assert made.max_micro_batch_size == 5


def test_a_commands_identity_and_conditions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "below" / "net.py").write_text("width = 1")

    def made(**options):
        arguments = [sys.executable, str(tmp_path / "train.py"), "{micro_batch_size}"]
        return CommandRunner(read_request(arguments, **options), tmp_path)

    before, unlimited = made().identity, made().conditions("limit")
    assert before["versions"]["python"] == sys.version.split()[0]
    assert made().identity == before
    (tmp_path / "below" / "net.py").write_text("width = 2")
    assert made().identity != before
    module = CommandRunner(read_request([sys.executable, "-m", "below.net", "{micro_batch_size}"]), tmp_path)
    (tmp_path / "below" / "net.py").write_text("width = 3")
    again = CommandRunner(read_request([sys.executable, "-m", "below.net", "{micro_batch_size}"]), tmp_path)
    assert again.identity["code"] != module.identity["code"]
    assert made(step_regex="x").conditions("limit") != made().conditions("limit")
    monkeypatch.setattr("batchwright.probe.command.resource.getrlimit", lambda which: (2**40, -1))
    assert made().conditions("limit") != unlimited, "ulimit -v"
    assert made(seconds=9).conditions("limit") == made().conditions("limit")
    assert made(seconds=9).conditions("throughput") != made().conditions("throughput")


def test_the_allocator_is_fixed_under_a_budget_only(monkeypatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    assert trial_environment(limited=True)["MALLOC_ARENA_MAX"] == "1"
    assert not [
        name for name in trial_environment(limited=False) if name in ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_")
    ]


def test_no_steps_in_the_output_end_the_search_for_speed_after_one_trial(script, tmp_path):
    made = probe(script("{micro_batch_size}", "2", "regex", "5"), dir=tmp_path / "j")
    assert made.max_micro_batch_size == 5
    assert made.saturating_micro_batch_size is None
    assert len([t for t in made.trials if t.purpose == "throughput"]) == 1
    assert any("ended with: epoch 0 | batch 0 | loss 1.0 / epoch 0 | batch 1" in note for note in made.notes)
    assert any("--step-regex" in note for note in made.notes)


def test_a_crash_is_not_memory(script, tmp_path):
    with pytest.raises(RunError, match="KeyError") as caught:
        probe(script("{micro_batch_size}", "2", "crash", "5"), dir=tmp_path / "j")
    assert "Traceback" in caught.value.__notes__[0]


def test_a_limit_below_the_libraries_of_the_command_is_named(tmp_path):
    script = "import sys, torch; print(sys.argv[1])"
    with pytest.raises(
        NothingFitsError, match=r"memory=100,000,000 bytes are not enough for the libraries.*imports included"
    ):
        probe([sys.executable, "-c", script, "{micro_batch_size}"], memory="100MB", dir=None)


def test_a_real_limit_of_address_space(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, time\nheld = bytearray(int(sys.argv[1]) * 2**20)\n"
        "for step in range(9):\n    print('step', step, 'loss', 1.0, flush=True)\n    time.sleep(0.05)\n"
    )
    command = [sys.executable, "-S", str(path), "{micro_batch_size}"]
    made = probe(command, memory="256MiB", dir=None, throughput=False, exact=True)
    assert made.first_failing_micro_batch_size == made.max_micro_batch_size + 1
    assert 150 < made.max_micro_batch_size < 256
    assert {t.cause for t in made.trials if not t.fits} == {"host-oom"}
    assert len(made.trials) <= 5


@pytest.mark.parametrize(("rows", "named"), [(100, True), (10**6, False)])
def test_a_dataset_that_is_smaller_than_the_batch_is_suspected(tmp_path, rows, named):
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nheld = b'x' * (min(int(sys.argv[1]), {rows}) * 2**18)\n")
    command = [sys.executable, "-S", str(path), "{micro_batch_size}"]
    made = probe(command, max=512, dir=None, throughput=False)
    assert made.max_micro_batch_size == 512
    assert any("does the dataset have fewer samples" in note for note in made.notes) == named


# What frameworks print per step, and what they print otherwise. Lines of Lightning, transformers, trl and tqdm are what their
# code printed into a pipe, with another number of the step; those of the others follow the format in the file that is named.
FORMATS = {
    # lightning 2.6.6 with TQDMProgressBar; each step is printed twice, and validation has a bar of its own.
    "lightning-tqdm": (
        lambda n: f"Epoch 0:  {4 * n}%|██        | {n}/25 [00:0{n}<00:00,  5.85it/s, train_loss=1.110]",
        [
            "Sanity Checking: |          | 0/? [00:00<?, ?it/s]",
            "Sanity Checking DataLoader 0:  50%|█████     | 1/2 [00:00<00:00,  4.65it/s]",
            "Training: |          | 0/? [00:00<?, ?it/s]",
            *(f"Validation DataLoader 0:  {n}0%|██        | {n}/10 [00:00<00:00,  9.18it/s]\x1b[A" for n in range(9)),
        ],
    ),
    # lightning 2.6.6 with its default bar, RichProgressBar, in a terminal or with TTY_COMPATIBLE=1.
    "lightning-rich": (
        lambda n: (
            "\x1b[2K\x1b[1A\x1b[2KEpoch 0/1  \x1b[35m━━━\x1b[0m\x1b[35m╸\x1b[0m\x1b[90m━━━━━━━\x1b[0m "
            f"{n}/25 \x1b[2m0:00:0{n} • 0:00:01\x1b[0m \x1b[2;4m6.29it/s\x1b[0m \x1b[3mtrain_loss: -5.29\x1b[0m"
        ),
        [
            "\x1b[2KSanity Checking \x1b[35m━━━━━\x1b[0m\x1b[35m╸\x1b[0m\x1b[90m━━━━\x1b[0m 1/2 \x1b[2m0:00:00 • -:--:--\x1b[0m",
            "                                                             \x1b[3mval_loss: -10.781  \x1b[0m",
            *(
                f"Validation \x1b[35m━━━\x1b[0m\x1b[90m━━━\x1b[0m {n}/9 \x1b[2m0:00:00 • 0:00:01\x1b[0m"
                for n in range(9)
            ),
        ],
    ),
    # The same two for a loader without a length: by Lightning's code, with made-up figures.
    "lightning-tqdm-unknown": (
        lambda n: f"Epoch 0: |          | {n}/? [00:0{n}<00:00,  5.85it/s, v_num=0]",
        [
            "Training: |          | 0/? [00:00<?, ?it/s]",
            "Epoch 0: |          | 0/? [00:00<?, ?it/s]",
            *(f"Validation DataLoader 0: |          | {n}/? [00:00<00:00,  9.18it/s]" for n in range(9)),
        ],
    ),
    "lightning-rich-unknown": (
        lambda n: (
            f"Epoch 0/-2 \x1b[35m━━━━━━━━\x1b[0m {n}/-- \x1b[2m0:00:0{n} • -:--:--\x1b[0m \x1b[2;4m6.29it/s\x1b[0m"
        ),
        [f"Validation \x1b[35m━━━━━━\x1b[0m {n}/-- \x1b[2m0:00:00 • -:--:--\x1b[0m" for n in range(9)],
    ),
    # transformers 5.22.2, its Trainer, and trl 1.16.0, whose SFTTrainer is one.
    "transformers": (
        lambda n: f" {4 * n}%|██▌       | {n}/25 [00:0{n}<00:02,  1.30it/s]",
        [
            "Generating train split: 4000 examples [00:00, 23977.38 examples/s]",
            *(f"Loading weights: {n}0%|██████████| {n}/10 [00:00<00:00, 1659.39it/s]" for n in range(9)),
            *(
                f"Tokenizing train dataset:   {n}%|          | {n}/100 [00:00<00:13, 303.24 examples/s]"
                for n in range(9)
            ),
            "{'loss': '5.498', 'grad_norm': '7.406', 'learning_rate': '5e-05', 'epoch': '0.0004268'}",
            "Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 386.54it/s]",
            "{'train_runtime': '1.953', 'train_samples_per_second': '8.191', 'train_loss': '5.429', 'epoch': '0.001707'}",
        ],
    ),
    # accelerate's example scripts have tqdm(range(max_train_steps)): the format of tqdm 4, with made-up figures.
    "accelerate": (
        lambda n: f"  {4 * n}%|▍         | {n}/25 [00:0{n}<00:05,  4.65it/s]",
        [f"Loading checkpoint shards:  {n}0%|██        | {n}/10 [00:00<00:00,  9.11it/s]" for n in range(9)],
    ),
    # A bar with a description, as many scripts make it: tqdm(loader, desc=f"Epoch {epoch}"), set_postfix(loss=...)
    "tqdm": (
        lambda n: f"Training:  {4 * n}%|#  | {n}/25 [00:0{n}<00:09,  2.50it/s]",
        [f"Evaluating:  {n}0%|##  | {n}/10 [00:00<00:00, 9it/s, loss=2.1]" for n in range(9)],
    ),
    "tqdm-loss": (
        lambda n: f"fold 1:  {4 * n}%|#  | {n}/25 [00:0{n}<00:09,  2.50it/s, loss=2.31]",
        [f"Downloading shards:  {n}0%|##  | {n}/10 [00:00<00:00, 9it/s]" for n in range(9)],
    ),
    # keras/src/utils/progbar.py; `predict` prints no loss.
    "keras": (
        lambda n: (
            f"\x1b[1m {n}/25\x1b[0m \x1b[32m━━━\x1b[0m\x1b[37m━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m1s\x1b[0m 60ms/step - loss: 2.3026"
            + "\b" * 54
        ),
        [
            f"\x1b[1m {n}/10\x1b[0m \x1b[32m━━━━━━\x1b[0m\x1b[37m━━━━━━━━━━━━━━\x1b[0m \x1b[1m0s\x1b[0m 9ms/step"
            for n in range(9)
        ],
    ),
    # The same, for data without a length.
    "keras-unknown": (
        lambda n: f"{n:7d}/Unknown \x1b[1m1s\x1b[0m 60ms/step - accuracy: 0.1250 - loss: 2.3026",
        [f"{n:7d}/Unknown \x1b[1m1s\x1b[0m 9ms/step" for n in range(9)],
    ),
    # torchtitan/components/metrics.py, with the prefix of torchtitan/tools/logging.py
    "torchtitan": (
        lambda n: (
            f"[titan] 2026-01-01 10:00:00,123 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss:  8.2256  \x1b[38;2;180;60;0m"
            "grad_norm:  1.1234  \x1b[38;2;54;234;195mmemory:  1.23GiB(1.55%)  \x1b[34mtps: 1,234  \x1b[36mtflops: 1.02  "
            "\x1b[35mmfu: 1.20%\x1b[39m"
        ),
        [
            "[titan] 2026-01-01 10:00:00,123 - root - INFO - Training starts at step 1",
            *(
                f"[titan] 2026-01-01 10:00:00,123 - root - INFO - \x1b[33mvalidate step: {n:2}  \x1b[32mloss:  8.2256  "
                for n in range(9)
            ),
        ],
    ),
    # litgpt/pretrain.py, and litgpt/finetune/*.py
    "litgpt": (
        lambda n: (
            f"Epoch 1 | iter {n} step {n // 4} | loss train: 2.100, val: n/a | iter time: 60.12 ms (step) "
            "remaining time: 0:00:21"
        ),
        [f"iter {n}: val loss 2.1000, val time: 20.00 ms" for n in range(9)],
    ),
    # megatron/training/training.py
    "megatron": (
        lambda n: (
            f" [2026-01-01 10:00:00] iteration {n:8d}/      25 | consumed samples:          256 | elapsed time per iteration "
            "(ms): 60.1 | learning rate: 1.000000E-04 | global batch size:   256 | lm loss: 1.046314E+01 | loss scale: 1.0 |"
        ),
        [
            *(f"Evaluating iter {n}/10" for n in range(9)),
            *(
                f" validation loss at iteration {n} | lm loss value: 1.04E+01 | lm loss PPL: 3.5E+04 | "
                for n in range(9)
            ),
        ],
    ),
    # src/maxtext/common/metric_logger.py; in older versions MaxText/metric_logger.py
    "maxtext": (
        lambda n: (
            f"completed step: {n}, seconds: 0.061, TFLOP/s/device: 1.234, Tokens/s/device: 99.123, total_weights: 4096, "
            "loss: 9.123, lm_loss: 9.123, perplexity: 9163.642"
        ),
        [
            *(f"eval metrics after step: {n}, loss=9.123, total_weights=4096" for n in range(9)),
            *(
                f"Completed eval step: {n}, seconds: 0.061, running loss=9.123, running perplexity=9.1"
                for n in range(9)
            ),
            *(f"Completed eval after train step {n}, loss=9.123, perplexity=9163.642" for n in range(9)),
        ],
    ),
    # deepspeed/runtime/engine.py, _report_progress, with the prefix of deepspeed/utils/logging.py, which prints it at level INFO
    "deepspeed": (
        lambda n: (
            f"[2026-01-01 10:00:00,123] [INFO] [logging.py:107:log_dist] [Rank 0] step={n}, skipped=0, lr=[0.001], "
            "mom=[(0.9, 0.999)]"
        ),
        ["[2026-01-01 10:00:00,123] [INFO] [logging.py:107:log_dist] [Rank 0] DeepSpeed Final Optimizer = adam"],
    ),
    # composer/loggers/console_logger.py: a duration in epochs, or in batches
    "composer": (
        lambda n: f"[epoch=1][batch={n}/25]:",
        ["\t Train loss/train/total: 2.3026", "[Eval batch=3/10] Eval on eval data", "\t Eval metrics/eval/loss: 2.3"],
    ),
    "composer-batches": (
        lambda n: f"[batch={n}/25]:",
        ["\t Train loss/train/total: 2.3026", *(f"[Eval batch={n}/10] Eval on eval data:" for n in range(9))],
    ),
}


@pytest.mark.parametrize("framework", FORMATS)
def test_what_frameworks_print_per_step(framework):
    step, others = FORMATS[framework]
    steps = _Steps(None, least=3, seconds=0.0)
    for when, line in enumerate(others * 9):
        assert not steps.see(line, float(when)), line
    assert steps.numbers == [], "a line that is not a step counts not even once"
    assert any(steps.see(step(n), 100.0 + n) for n in range(1, 8))
    assert steps.timing().seconds == pytest.approx(1.0)


KERAS = "\x1b[1m1/1\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m0s\x1b[0m 60ms/step - loss: 2.3026"
EPOCHS_OF_ONE_STEP = {
    # Keras prints the last step of an epoch twice.
    "keras": lambda n: [f"Epoch {n}/25", KERAS, KERAS],
    "word_language_model": lambda n: [f"| epoch {n:3d} |     1/    1 batches | lr 20.00 | loss  6.77 | ppl   871.16"],
    "composer": lambda n: [f"[epoch={n}][batch=1/1]:", "\t Train loss/train/total: 2.3026"],
    "lightning": lambda n: [f"Epoch {n}: 100%|██████████| 1/1 [00:00<00:00,  5.85it/s, train_loss=1.110]"] * 3,
}


@pytest.mark.parametrize("framework", EPOCHS_OF_ONE_STEP)
def test_epochs_of_one_step_are_steps(framework):
    """The batch is as large as the dataset."""
    steps = _Steps(None, least=3, seconds=0.0)
    enough = [
        any([steps.see(line, n + later / 100) for later, line in enumerate(EPOCHS_OF_ONE_STEP[framework](n))])
        for n in range(1, 8)
    ]
    assert enough == [False] * 3 + [True] * 4
    assert steps.timing().seconds == pytest.approx(1.0)


def test_a_bar_that_is_drawn_again_is_not_a_step():
    steps = _Steps(None, least=3, seconds=0.0)
    bar = "Epoch 0/9 ━━━━━━━━━━ 1/1 0:00:01 • 0:00:00 6.29it/s"
    assert not any(steps.see(line, float(n)) for n in range(9) for line in (bar, "   val_loss: -10.781"))
    assert steps.numbers == [1]


def test_a_file_that_the_command_writes_is_not_its_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import random, sys\n"
        "open('log.json', 'a').write(str(random.random()))\n"
        "open('generated.py', 'w').write(f'seed = {random.random()}')\n"
        "sys.exit('MemoryError' if int(sys.argv[1]) > 5 else 0)\n"
    )
    (tmp_path / "log.json").write_text("{}")
    command = [sys.executable, "-S", "train.py", "{micro_batch_size}", "log.json"]
    first = probe(command, dir="j", throughput=False)
    again = probe(command, dir="j", throughput=False)
    assert all(t.resumed for t in again.trials) and len(again.trials) == len(first.trials)
    (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + "# edited\n")
    edited = probe(command, dir="j", throughput=False)
    assert not any(t.resumed for t in edited.trials)
    assert any("code changed: " in note and "train.py" in note for note in edited.notes)


@pytest.mark.parametrize(
    ("file", "edited", "resumed"),
    [
        ("model.py", "first", False),  # an edit during the probe
        ("config.yaml", "first", False),
        ("train.py", "first", False),
        ("model.py", "always", False),  # code stays code, whoever writes it
        ("config.yaml", "always", True),  # the command writes it
        ("made.py", "always", True),
    ],
)
def test_a_file_is_output_only_if_it_is_new_or_changes_in_two_trials(tmp_path, monkeypatch, file, edited, resumed):
    monkeypatch.chdir(tmp_path)
    for name in ("model.py", "config.yaml"):
        (tmp_path / name).write_text("# before\n")
    (tmp_path / "train.py").write_text(
        "import os, sys\n"
        f"if {edited!r} == 'always' or not os.path.exists('done'):\n"
        f"    open({file!r}, 'a').write('# edited\\n')\n"
        "open('done', 'w')\n"
        "sys.exit('MemoryError' if int(sys.argv[1]) > 5 else 0)\n"
    )
    command = [sys.executable, "-m", "train", "{micro_batch_size}", "config.yaml"]
    probe(command, dir="j", throughput=False)
    again = probe(command, dir="j", throughput=False)
    assert {t.resumed for t in again.trials} == {resumed}
    if file == "config.yaml" and resumed:  # --fresh also forgets what was output
        probe(command, dir="j", throughput=False, fresh=True, max=1)
        assert not any(t.resumed for t in probe(command, dir="j", throughput=False, max=1).trials)


def test_a_resumed_command(script, tmp_path):
    arguments = script("{micro_batch_size}", "100000", "marker", "5")
    probe(arguments, dir=tmp_path / "j", throughput=False)
    assert all(t.resumed for t in probe(arguments, dir=tmp_path / "j", throughput=False).trials)
    (tmp_path / "train.py").write_text(SCRIPT + "\n# edited\n")
    made = probe(arguments, dir=tmp_path / "j", throughput=False)
    assert any(note.startswith("code changed") for note in made.notes)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's choice is Linux's")
def test_a_command_is_what_the_kernel_ends_if_the_host_is_out_of_memory(tmp_path):
    script = "import sys; print(open('/proc/self/oom_score_adj').read(), file=open(sys.argv[1], 'w'))"
    command = [sys.executable, "-S", "-c", script, str(tmp_path / "{micro_batch_size}")]
    made = probe(command, dir=None, throughput=False, max=1)
    assert made.max_micro_batch_size == 1 and (tmp_path / "1").read_text().strip() == "1000"


def test_a_program_that_is_not_there():
    with pytest.raises(EnvironmentFault, match="no-such-program: No such file"):
        probe(["no-such-program", "{micro_batch_size}"], dir=None)


def test_a_command_needs_its_placeholder_and_no_ranks():
    with pytest.raises(ConfigError) as caught:
        probe(["python", "train.py"], ranks=2, dir=None)
    assert [v.field for v in caught.value.violations] == ["command", "ranks"]
