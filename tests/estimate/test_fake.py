"""Torch on fake tensors, inside the test process."""

from __future__ import annotations

import pytest

from batchwright.core.errors import EnvironmentFault, NothingFitsError, PlanError, RunError
from batchwright.estimate import estimate, predict_slope
from batchwright.estimate.estimate import trial_point
from batchwright.estimate.records import EstimateRequest, Point
from batchwright.estimate.worker import answer

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("in_process")]
PARAMETERS = 5862400  # of the small GPT, in bytes


def test_the_largest_batch_its_breakdown_and_its_line(tasks):
    made = estimate(f"{tasks}:gpt", memory_bytes=2**30, args={"layers": 1})
    assert made.to_json()["args"] == {"layers": "1"}
    by_size = {p.micro_batch_size: p for p in made.points}
    best = made.max_micro_batch_size
    assert by_size[best].peak_memory_bytes <= 2**30 < made.lengths[0].slope.predict(best + 1)
    assert all(sum(p.breakdown.values()) == p.peak_memory_bytes for p in made.points)
    # At one sample the optimizer's step is the peak: weights, gradients, two moments. Later activations are.
    first = by_size[1].breakdown
    assert first["parameters"] == first["gradients"] and first["optimizer"] > 2 * first["parameters"]
    assert by_size[best].breakdown["activations"] > 0.9 * by_size[best].peak_memory_bytes
    document = made.to_json()
    assert document["schema"] == 1 and document["source"] == "predicted"
    both = estimate(f"{tasks}:gpt", memory_bytes=2**30, args={"layers": 1}, micro_batch_sizes=(best, best + 1))
    assert [p["fits"] for p in both.to_json()["points"]] == [True, False]
    assert any("not validated on a device" in line for line in made.assumptions)


def test_peaks_are_straight_once_activations_dominate(tasks, peaks):
    at = peaks(f"{tasks}:gpt", (4, 8, 64))
    assert at[4] + (at[8] - at[4]) / 4 * 60 == pytest.approx(at[64], rel=1e-4)
    assert at == peaks(
        f"{tasks}:gpt", (4, 8, 64), args={"built": True}
    )  # a model instead of a function that builds one


def test_checkpointing_precision_and_accumulation_move_the_peak(tasks, peaks):
    plain = peaks(f"{tasks}:gpt", (16,))[16]
    assert peaks(f"{tasks}:gpt", (16,), checkpoint_activations=True)[16] < 0.85 * plain
    assert peaks(f"{tasks}:gpt", (16,), precision="bf16")[16] < 0.95 * plain
    gradients = peaks(f"{tasks}:gpt", (16,), accumulation_steps=8)[16] - plain
    assert 0.9 < gradients / PARAMETERS < 1.1  # they are held while the second micro batch runs forward


@pytest.mark.parametrize(
    ("how", "dtype"),
    [("device", "float32"), ("meta", "float32"), ("to", "bfloat16"), ("half", "float16"), ("double", "float64")],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_its_function_converts_is_one_of_that_dtype(tasks, how, dtype, tied):
    def held(**args):
        made = answer(
            "estimate", EstimateRequest(f"{tasks}:converted", args={"tied": tied, **args}, micro_batch_sizes=(1, 4))
        )
        return [(point["peak_memory_bytes"], point["breakdown"]) for point in made["points"]]

    assert held(how=how) == held(dtype=dtype)


def test_shards_divide_what_is_held(tasks, peaks):
    result = answer("estimate", EstimateRequest(f"{tasks}:gpt", ranks=8, micro_batch_sizes=(2, 4)))
    small, large = result["points"]
    assert small["breakdown"]["optimizer"] == pytest.approx(2 * PARAMETERS / 8, rel=0.01)
    whole = peaks(f"{tasks}:gpt", (2, 4))  # sharding divides what is held; activations stay
    assert large["peak_memory_bytes"] - small["peak_memory_bytes"] == pytest.approx(whole[4] - whole[2], rel=0.01)
    options = {"args": {"built": True}, "ranks": 4, "precision": "bf16", "checkpoint_activations": True}
    made = answer(
        "estimate",
        EstimateRequest(f"{tasks}:gpt", micro_batch_sizes=(1,), accumulation_steps=2, accelerator=True, **options),
    )
    # Even where the optimizer is the peak: a quarter of two moments, and of what it computes with.
    assert made["points"][0]["breakdown"]["optimizer"] < PARAMETERS

    import torch.distributed as dist

    assert not dist.is_initialized()  # the ranks were pretended, and are gone


def test_devices_update_all_parameters_at_once(tasks, peaks):
    assert peaks(f"{tasks}:gpt", (1,), accelerator=True)[1] > peaks(f"{tasks}:gpt", (1,))[1]


def test_the_frontier_predicts_what_the_estimate_finds(tasks, peaks):
    options = {"flash": False, "layers": 1}
    made = estimate(f"{tasks}:gpt", args=options, memory_bytes=2**29, sequence_lengths=(64, 128))
    assert made.fit is not None and made.fit.error < 0.01 and made.fit.quadratic > 10  # scores: 4 heads, several copies
    [row] = [r for r in made.frontier if r.sequence_length == 512]
    assert row.source == "fit"
    at = peaks(f"{tasks}:gpt", (row.max_micro_batch_size,), args=options, sequence_lengths=(512,))
    predicted = made.fit.constant + row.max_micro_batch_size * (made.fit.linear * 512 + made.fit.quadratic * 512**2)
    assert at[row.max_micro_batch_size] == pytest.approx(predicted, rel=0.01)
    assert made.max_micro_batch_size == made.lengths[-1].max_micro_batch_size


def test_the_prober_gets_a_line(tasks):
    slope = predict_slope(f"{tasks}:small")
    # Two layers of 16: the input, and per layer a product and an activation; and what the loss holds. While the
    # optimizer's step is the peak, only the input grows.
    assert slope.bytes_per_sample > 5 * 16 * 4 and slope.predict(1000) > 1000 * slope.bytes_per_sample
    near = predict_slope(f"{tasks}:small", memory_bytes=2**24)
    assert near.bytes_per_sample == pytest.approx(slope.bytes_per_sample, rel=0.02)


def test_the_line_of_the_longest_sample_is_steeper(tasks):
    first, longest = (predict_slope(f"{tasks}:late", longest=longest) for longest in (False, True))
    assert longest.bytes_per_sample == pytest.approx(40 * first.bytes_per_sample, rel=0.02)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_the_users_own_model_are_followed(tasks, peaks, reentrant):
    plain, recomputed = (peaks(f"{tasks}:recomputed", (64, 128), args={"reentrant": how}) for how in (None, reentrant))
    # Six blocks of 16 -> 256 -> 16: without checkpoints, each holds its input, the inner product and its activation. With
    # them, each holds its input, and one is computed again.
    per_sample = [(found[128] - found[64]) / 64 / 4 for found in (plain, recomputed)]
    assert per_sample[0] > 6 * (16 + 2 * 256)
    assert 6 * 16 + 2 * 256 < per_sample[1] < 6 * 16 + 5 * 256
    twice = peaks(f"{tasks}:recomputed", (64,), args={"reentrant": reentrant}, accumulation_steps=2)
    assert recomputed[64] < twice[64] < plain[64]


def test_nothing_frozen_cannot_be_stored_in_four_bits(tasks):
    with pytest.raises(PlanError, match="no linear layer is frozen") as caught:
        estimate(f"{tasks}:small", micro_batch_sizes=(1,), quantize_frozen=True)
    assert caught.value.field == "quantize_frozen"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("masked", r"tasks\.py:\d+: `kept = y\[y > 0\]` \(aten\.nonzero.*shape of its result depends on the data"),
        ("counted", r"`return model\(x\)\.sum\(\), int\(\(x > 0\)\.sum\(\)\)` \(aten\._local_scalar_dense.*reads a"),
        ("as_numpy", r"\.numpy\(\)\.mean\(\)\).*\.numpy\(\) is not supported"),
    ],
)
def test_what_fake_tensors_cannot_follow_is_refused_by_name(tasks, name, named):
    with pytest.raises(PlanError, match=named) as caught:
        estimate(f"{tasks}:{name}", micro_batch_sizes=(2,))
    assert caught.value.nearest == (f"batchwright probe {tasks}:{name}",)
    assert "Measure instead: batchwright probe" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("wrong", "the labels are missing"), ("mismatched", "RuntimeError"), ("broken", "ValueError: no data")],
)
def test_a_task_that_fails_shows_its_own_traceback(tasks, name, text):
    with pytest.raises(RunError, match=text) as caught:
        estimate(f"{tasks}:{name}", micro_batch_sizes=(2,))
    (trace,) = caught.value.__notes__
    assert trace.startswith("Traceback") and "tasks.py" in trace and "batchwright/estimate" not in trace
    assert caught.value.exit_code == 5


def test_values_of_the_data_may_be_read_outside_the_step(tasks, peaks):
    assert peaks(f"{tasks}:reads_its_data", (2, 64))[64] > 0


def test_batches_that_are_not_only_tensors_are_collated(tasks, peaks):
    at = peaks(f"{tasks}:ragged", (64, 128))
    four = peaks(f"{tasks}:small", (4 * 64, 4 * 128))  # each of the longest samples is four rows
    assert at[128] - at[64] == pytest.approx(four[4 * 128] - four[4 * 64], rel=0.25)


def test_samples_that_are_mappings_of_their_own_count_like_dicts(tasks, peaks):
    """The longest of them is found, and the collator takes parts out of a copy."""
    assert peaks(f"{tasks}:ragged", (64,), args={"mapping": "user"}) == peaks(f"{tasks}:ragged", (64,))


@pytest.mark.parametrize("mapping", ["user", "own", "fields"])
def test_a_batch_that_is_a_container_of_its_own_counts_like_a_dict(tasks, peaks, mapping):
    sizes = (64, 4096)
    assert peaks(f"{tasks}:encoded", sizes, args={"mapping": mapping}) == peaks(f"{tasks}:encoded", sizes)


def test_a_scalar_tensor_in_the_batch_stays_a_scalar(tasks, peaks):
    with_scale, without = (peaks(f"{tasks}:encoded", (4096,), args={"scale": scale})[4096] for scale in (True, False))
    assert with_scale - without == 4  # bytes of the scalar; the product takes the place of its input


def test_the_state_that_an_optimizer_makes_in_its_constructor_counts_once(tasks, peaks):
    at = {name: peaks(f"{tasks}:made_at_once", (2048,), args={"optimizer": name})[2048] for name in ("Adagrad", "SGD")}
    assert at["Adagrad"] - at["SGD"] == pytest.approx(0, abs=4096)  # Adagrad counts its steps, too


def test_a_loss_may_call_the_model_twice(tasks, peaks):
    assert peaks(f"{tasks}:twice", (2,), accumulation_steps=2)[2] > peaks(f"{tasks}:small", (2,))[2]


def test_frozen_parameters_and_optimizers_that_read_values_are_followed(tasks):
    made = estimate(f"{tasks}:frozen", micro_batch_sizes=(64,))
    assert made.points[0].breakdown["parameters"] == (16 * 16 + 16 + 16 * 16) * 4


def test_a_note_says_that_recurrent_kernels_are_not_estimated(tasks):
    made = estimate(f"{tasks}:recurrent", micro_batch_sizes=(2,))
    assert any("LSTM" in note and "--calibrate" in note for note in made.notes)


def test_nothing_fits(tasks):
    with pytest.raises(
        NothingFitsError, match=r"micro_batch_size=1 needs an estimated .*parameters 2\.1 KiB"
    ) as caught:
        estimate(f"{tasks}:small", memory_bytes=4096)
    assert caught.value.exit_code == 3 and caught.value.nearest[0] > 4096


def test_checkpointing_without_blocks_is_refused(tasks):
    with pytest.raises(PlanError, match="finds no repeated blocks in Sequential"):
        estimate(f"{tasks}:small", micro_batch_sizes=(2,), checkpoint_activations=True)


def test_one_error_lists_everything_that_is_wrong():
    with pytest.raises(PlanError) as caught:
        estimate(
            "x.py:task",
            device="t4-16g",
            memory_bytes=5,
            precision="fp8",
            micro_batch_sizes=(0,),
            ranks=2,
            margin_bytes=2**40,
            calibrate=True,
        )
    fields = [v.field for v in caught.value.violations]
    assert fields == ["memory", "margin", "precision", "micro_batch_size", "calibrate"]


def test_a_missing_file_function_or_argument_is_named(tasks):
    with pytest.raises(PlanError, match="does not exist"):
        estimate("missing.py:task")
    with pytest.raises(PlanError, match="takes no argument 'sequence_length'"):
        estimate(f"{tasks}:small", sequence_lengths=(8,))


def test_the_trial_fits_into_the_memory_of_this_machine():
    rows = [Point(b, None, b * 2**28, {}) for b in (1, 2, 64)]
    assert trial_point(rows, 2**34).micro_batch_size == 2
    assert trial_point(rows[2:], 2**35).micro_batch_size == 64
    with pytest.raises(EnvironmentFault, match=r"estimated at 16\.00 GiB, and this machine has 1\.00 GiB free"):
        trial_point(rows[2:], 2**30)
