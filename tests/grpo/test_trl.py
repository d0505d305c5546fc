"""The gradient of one update, ours against TRL's own, on the responses that TRL sampled."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from itertools import groupby
from tempfile import TemporaryDirectory

import pytest
import torch

import batchwright
from batchwright.runtime import RLSettings, train_rl
from tests.needs import needs

pytestmark = [
    pytest.mark.torch,
    # TRL and what it imports warn of their own deprecations, which differ by version.
    pytest.mark.filterwarnings("ignore"),
]
BATCH = {"prompts": 8, "generations": 8, "micro_responses": 16}
WEIGHTING = {"dapo": "tokens", "grpo": "responses", "dr_grpo": "constant"}


@pytest.fixture(scope="module")
def peer():
    needs("trl")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.grpo import peer

        yield peer
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy(peer):
    torch.manual_seed(0)
    return peer.grpo.Policy(peer.grpo.Shape(positions=18))


def theirs(peer, policy, tmp_path, loss_type, **more):
    """TRL's micro batches of one update, and its gradient under our names. max_grad_norm=0: it clips before a callback."""
    data = peer.grpo.Sorting(8, 16, 1, seed=0)
    trainer = peer.trainer(
        peer.Recorded, policy, data.rows, tmp_path, updates=1, loss_type=loss_type, max_grad_norm=0.0, **BATCH | more
    )
    trainer.train()
    return trainer.micro_batches, peer.ours(policy, trainer.gradients[0])


def relative_error(mine, reference) -> float:
    pairs = [(mine[name] - reference[name], reference[name]) for name in reference]
    return (sum(d.square().sum() for d, _ in pairs) / sum(r.square().sum() for _, r in pairs)).sqrt().item()


def responses(peer, micro_batches):
    """TRL's shuffled responses, sorted by prompt so that groups are whole again: prompts, sampled tokens, advantages."""
    whole = {k: torch.cat([m[k] for m in micro_batches]) for k in micro_batches[0] if k != "num_items_in_batch"}
    order = sorted(range(len(whole["prompt_ids"])), key=lambda i: whole["prompt_ids"][i].tolist())
    whole = {k: v[order] for k, v in whole.items()}
    mask = whole["completion_mask"].bool()
    return whole["prompt_ids"], torch.where(mask, whole["completion_ids"], peer.grpo.FILLER), mask, whole["advantages"]


class Kept(torch.optim.SGD):
    """It keeps the gradient and changes nothing."""

    def step(self, closure=None):
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


def mine(peer, policy, micro_batches, weighting, micro_responses):
    """The gradient of one update of `train_rl` on the same responses; advantages are the example's, from the rewards."""
    prompts, tokens, mask, _ = responses(peer, micro_batches)
    with torch.no_grad():  # the probabilities of the policy that sampled: TRL takes those of the first pass, too
        logits = policy(torch.cat([prompts, tokens[:, :-1]], dim=1))[:, prompts.shape[1] - 1 :]
        logps = torch.log_softmax(logits, dim=2).gather(2, tokens[:, :, None])[:, :, 0]
    rewards, lengths = peer.grpo.rewards(prompts, tokens).tolist(), mask.sum(dim=1).tolist()
    rows = [
        {"prompt": prompts[i].numpy(), "tokens": tokens[i, :n].numpy(), "log_probabilities": logps[i, :n].numpy()}
        | {"reward": rewards[i]}
        for i, n in enumerate(lengths)
    ]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["prompt"].tolist())]
    kept: list[Kept] = []
    task = replace(
        peer.example.task(digits=prompts.shape[1] - 1, size=1, held_out=1, weighting=weighting),
        model=lambda: deepcopy(policy),
        dataset=list(range(len(groups))),
        optimizer=lambda parameters: kept.append(Kept(parameters, lr=1.0)) or kept[0],
        rollout=lambda _, asked, generations: [groups[i] for i in asked.data],
    )
    plan = batchwright.rl(prompts=len(groups), generations=len(groups[0]), train_micro_responses=micro_responses)
    with TemporaryDirectory() as out:
        train_rl(task, plan, RLSettings(directory=out, threads=1, progress=False), rounds=1)
    return dict(zip((name for name, _ in policy.named_parameters()), kept[0].gradients, strict=True))


def test_the_models_are_equal_and_so_are_the_advantages(peer, policy, tmp_path):
    micro_batches, _ = theirs(peer, policy, tmp_path, "dapo")
    prompts, tokens, mask, advantages = responses(peer, micro_batches)
    torch.testing.assert_close(peer.gpt2(policy).eval()(prompts).logits, policy(prompts))
    rewards = peer.grpo.rewards(prompts, tokens).view(BATCH["prompts"], BATCH["generations"])
    torch.testing.assert_close(peer.grpo.group_relative(rewards).flatten(), advantages)
    assert len(set(mask.sum(dim=1).tolist())) > 4  # uneven lengths, else every weighting is the same


@pytest.mark.parametrize("loss_type", WEIGHTING)
def test_a_loss_type_of_trl_is_a_weighting_of_ours(peer, policy, tmp_path, loss_type):
    micro_batches, reference = theirs(peer, policy, tmp_path, loss_type)
    for weighting in peer.grpo.WEIGHTINGS:
        for micro_responses in (64, 8):
            error = relative_error(mine(peer, policy, micro_batches, weighting, micro_responses), reference)
            if weighting == WEIGHTING[loss_type]:
                assert error < 1e-5, (weighting, micro_responses)
            else:
                assert error > 0.1, (weighting, micro_responses)


def test_bnpo_depends_on_the_micro_batch(peer, policy, tmp_path):
    """It averages each micro batch over its own tokens: with one micro batch it is our `tokens`, with four it is not."""
    errors = []
    for micro_responses in (64, 16):
        micro_batches, reference = theirs(peer, policy, tmp_path, "bnpo", micro_responses=micro_responses)
        errors.append(relative_error(mine(peer, policy, micro_batches, "tokens", 8), reference))
    assert errors[0] < 1e-5 and errors[1] > 0.02


def test_several_updates_per_generation_differ_in_trl(peer, policy, tmp_path):
    """TRL shuffles responses over all updates of a generation batch, so groups are split; and its `dapo` divides every
    update by the mean number of tokens of an update, not by the update's own."""
    more = {"updates": 2, "steps_per_generation": 8, "loss_type": "dapo", "max_grad_norm": 0.0}
    rows = peer.grpo.Sorting(8, 16, 1, seed=0).rows
    trainer = peer.trainer(peer.Recorded, policy, rows, tmp_path, **BATCH, **more)
    trainer.train()
    updates = trainer.micro_batches[:4], trainer.micro_batches[4:]
    prompts = [{tuple(row) for m in update for row in m["prompt_ids"].tolist()} for update in updates]
    assert len(prompts[0] & prompts[1]) > 8  # of 16 prompts; with whole groups it would be none
    tokens = [sum(int(m["completion_mask"].sum()) for m in update) for update in updates]
    assert tokens[0] != tokens[1]
    policy.zero_grad()
    for micro in updates[0]:  # by hand: an update of the executor has whole groups
        mask = micro["completion_mask"].bool()
        sampled = peer.grpo.Sampled(micro["completion_ids"], mask.sum(dim=1), micro["old_per_token_logps"])
        peer.grpo.policy_loss(policy, micro["prompt_ids"], sampled, micro["advantages"])[0].backward()
    divided = {name: p.grad / (sum(tokens) / 2) for name, p in policy.named_parameters()}
    assert relative_error(divided, peer.ours(policy, trainer.gradients[0])) < 1e-5
