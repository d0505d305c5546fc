"""What `check` says: for each cause what is wrong, the numbers that show it, and what to change, with a line of code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .structure import Structure

if TYPE_CHECKING:
    from .causes import Scale

_SUM = (
    "Return the sum and what it is a sum over: `return F.cross_entropy(logits, labels, "
    'reduction="sum"), (labels != -100).sum()`.'
)


def number(value: float) -> str:
    """A relative error or a factor, short.

    >>> number(0.30000001), number(2.3e-7), number(15.99)
    ('0.3', '2.3e-07', '16')
    """
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"


def _at(scale: Scale) -> str:
    return f"{scale.accumulation_steps} micro batches of {scale.micro_batch_size}"


def dropout(draws: float, error: float) -> str:
    moves = f"another seed moves the full batch's gradient by {number(draws)}, and " if draws else ""
    return (
        f"the task draws random numbers while it trains (dropout, noise, masking in collate): {moves}a split draws in another "
        f"order (off by up to {number(error)}). Splits are equal in distribution, not number by number, and that is all that "
        "training needs. All else was checked with the draws fixed."
    )


def unknown_draws(left: float, collate: bool) -> str:
    shown = (
        "collating the same samples twice gives different tensors"
        if collate
        else (f"the gradient of the same batch differs by {number(left)} between two seeds")
    )
    return (
        f"{shown}, even with dropout off and torch's draws fixed, so splits cannot be compared. Draw in dataset[i], which is "
        "seeded by position and the same at any split, or let an `--arg` switch the draw off for the check."
    )


def precision(error: float, kind: str, micro: int, exact: bool) -> str:
    proof = "and vanishes in fp64: it is rounding, not logic" if exact else "and is small enough to be rounding"
    return (
        f"the gradient in micro batches of {micro} is off by {number(error)} in the task's own arithmetic (parameters: "
        f"{kind}) {proof}. Every split rounds differently; where it matters keep parameters in fp32 and use "
        "`torch.autocast(device, torch.bfloat16)`, or leave the last layer and the loss in fp32: `logits.float()`."
    )


def batch_norm(before: float | None, after: float, failed: list[int]) -> str:
    if before is None:
        shown = "no split could be run"
    else:
        shown = f"the gradient is off by {number(before)}, and by {number(after)} with statistics frozen"
        shown += " (what is left has another cause)" if after > 1e-3 * before else ""
    cannot = f" Micro batches of {failed[0]} cannot be normalised at all." if failed else ""
    return (
        f"BatchNorm normalises by its own micro batch, so the split is part of the model: {shown}. Its running statistics "
        f"are updated once per micro batch as well.{cannot} Use a norm that looks at one sample: `nn.GroupNorm(32, "
        "channels)`, or freeze it: `bn.eval()`. SyncBatchNorm joins ranks, but not micro batches. To accept it: "
        "`--allow batch-norm`."
    )


def mean_with_count(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient grows with the number of micro batches: {number(worst.factor)}× the full batch's at {_at(worst)}. "
        f"For twice the samples the loss returned stays the same ({number(facts.loss_factor)}×: a mean) while its weight grows "
        f"({number(facts.weight_factor)}×), so {worst.accumulation_steps} means are added up and divided by one count. {_SUM}"
    )


def constant_weight(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient shrinks with the number of micro batches: {number(worst.factor)}× the full batch's at {_at(worst)}. "
        f"The loss returned is a sum ({number(facts.loss_factor)}× for twice the samples), but its weight stays the same "
        f"({number(facts.weight_factor)}×), so every micro batch adds a whole one. {_SUM}"
    )


def mean_of_means(worst: Scale, rest: bool = False) -> str:
    what = (
        f"beside its scale it is off by {number(worst.rest / abs(worst.factor))}"
        if rest
        else f"it is off by {number(worst.error)}"
    )
    return (
        f"the gradient is a mean of the micro batches' means: {what} at {_at(worst)}. Each micro batch counts the same, "
        f"however many tokens or samples it holds. {_SUM}"
    )


def ragged_tail(worst: Scale, size: int) -> str:
    full, tail = divmod(size, worst.micro_batch_size)
    return (
        f"the gradient is off by {number(worst.error)} where the last micro batch is short ({size} samples = {full} × "
        f"{worst.micro_batch_size} + {tail}), and right where all are equal: the loss is a mean with a constant weight, so the "
        f"short one counts as much as a full one. {_SUM}"
    )


def shares_differ(facts: Structure, worst: Scale) -> str:
    parts = " and ".join(number(share) for share in facts.shares)
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}: joined into one micro batch, two pieces count {parts} "
        "times what they count alone. The loss is divided by something that depends on the micro batch, such as its padded "
        f"length or its number of tokens. {_SUM}"
    )


def weights_do_not_add(facts: Structure, worst: Scale) -> str:
    return (
        f"the gradient is {number(worst.factor)}× the full batch's at {_at(worst)} (off by {number(worst.error)}): the loss is "
        f"a sum, but weights do not add up. Two pieces joined weigh {number(facts.weight_joined)}× what they weigh alone, as "
        "when padding is counted. Count what the loss sums over: `weight = (labels != -100).sum()`."
    )


def interaction(facts: Structure, worst: Scale) -> str:
    head = (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}, and no weights can repair it: a sample's gradient "
        f"depends on which others share its micro batch (joined, two pieces are {number(facts.apart)} away from any sum of "
        "what they give alone)"
    )
    if facts.padding:
        return (
            f"{head}. Between samples of one shape it does not, so it is the padding that takes part. Mask it: `attention_mask="
            "mask` or `src_key_padding_mask=~mask` in the model, `ignore_index=-100` in the loss."
        )
    also = " or padding that is not masked" if facts.padding is None else ""
    return (
        f"{head}: in-batch negatives, batch statistics, a loss over pairs{also}. Such a loss is not a sum over samples, and "
        "splitting it changes what is trained. Run the batch in one piece (`--micro-batch-size` = the batch per rank), or "
        "cache the embeddings (GradCache): negatives from a queue, not from the micro batch."
    )


def auxiliary_in_sum(facts: Structure, worst: Scale) -> str:
    where = f" (its gradient: {', '.join(facts.mean_modules)})" if facts.mean_modules else ""
    return (
        f"a mean hides in the sum: doubling the samples doubles one part of the loss and leaves another as it is{where}. "
        f"That part is added once per micro batch, {worst.accumulation_steps} times at {_at(worst)}, so its scale depends on "
        f"the split (gradient off by {number(worst.error)}). Return it as the third value: `return loss_sum, weight, "
        "auxiliary_mean`; it then enters as weight × mean."
    )


def auxiliary_as_sum(facts: Structure, worst: Scale) -> str:
    return (
        f"the third value grows with the batch ({facts.auxiliary}, not a mean), and it is multiplied by the weight already: "
        f"at {_at(worst)} the gradient is off by {number(worst.error)}. Return a mean over the micro batch: `return loss_sum, "
        "weight, balance.mean()`."
    )


def auxiliary_per_batch(facts: Structure, worst: Scale, alone: float) -> str:
    return (
        f"the auxiliary mean is a statistic of its micro batch (two pieces joined: {number(facts.auxiliary_joined)} away from "
        f"their mean), as a router's balance loss is. It keeps its scale, but not its value: with it the gradient is off by "
        f"{number(worst.error)} at {_at(worst)}, without it by {number(alone)}. Frameworks balance per micro batch on purpose; "
        "if it should be global, all-reduce the router's counts before the loss."
    )


def keeps_state(kept: float, worst: Scale) -> str:
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)}: the model, the loss or collate keeps state from one "
        f"micro batch to the next. The same batch a second time, without an optimizer step between, gives a gradient that "
        f"differs by {number(kept)}. Update such state once per optimizer step: `optimizer.register_step_post_hook(...)`."
    )


def unexplained(worst: Scale, groups: dict[str, float]) -> str:
    listed = ", ".join(f"{name} {number(error)}" for name, error in list(groups.items())[:3])
    return (
        f"the gradient is off by {number(worst.error)} at {_at(worst)} ({number(worst.factor)}× the full batch's along it), "
        f"most of it in {listed}, and none of the known causes shows in the experiments. Compare `loss(model, batch)` on two "
        "samples with the same two apart: the sums have to be equal, and so do the weights."
    )
