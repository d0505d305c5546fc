"""The loop of reinforcement learning: `train_rl(task, plan, settings)`, from its newest checkpoint to its end or a signal.

    for each round, a step of the schedule of prompts:
        for each update of the round:
            for each micro step:
                responses = those of its prompts, as soon as they are finished     # sampling overlaps training here
                backward(loss(model, collate(responses)))
            divide, clip, step the optimizer;  policy version += 1
        publish the weights;  record the round;  save or stop if it is time

Everything before and after the rounds is that of `train`: the order, the ledger, checkpoints, events, the fence. Samples are
prompts, and steps are rounds. A checkpoint is made between two rounds; what has been sampled since is in files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from batchwright.core.codec import encode
from batchwright.core.errors import PlanError, RunError
from batchwright.core.ramp.rules import Constant
from batchwright.core.ramp.schedule import Schedule, Step
from batchwright.core.rl import RLPlan
from batchwright.rundir.status import Status
from batchwright.runtime.device import to_device
from batchwright.runtime.loop.events import Tracker
from batchwright.runtime.loop.process import joined
from batchwright.runtime.loop.session import OnStep
from batchwright.runtime.loop.signals import StopSignals
from batchwright.runtime.loop.train import Loop
from batchwright.runtime.state.checkpoint import Saved
from batchwright.runtime.state.updates import Updates
from batchwright.runtime.step.accumulate import Accumulator, StepResult

from .feed import Feed
from .link import LAUNCH, SIGNAL, digest_of, size_of, weights_of
from .ranks import Side, divided, on_ranks, serve_rank, tell_failure, tell_status
from .record import Clock, RoundResult, round_event
from .responses import Piece, Responses
from .rollouts import Rollouts
from .rounds import Rounds, Update
from .settings import RLSettings
from .task import RLTask
from .worker import Sampler, Workers, in_a_thread, in_processes

OnRound = Callable[[RoundResult, nn.Module], None]


def train_rl(
    task: RLTask,
    plan: RLPlan,
    settings: RLSettings,
    *,
    rounds: int | None = None,
    schedule: Schedule | None = None,
    trackers: Sequence[Tracker] = (),
    may_save: Callable[[], bool] | None = None,
    on_step: OnStep | None = None,
    on_round: OnRound | None = None,
) -> Status:
    """Train `task` as `plan` says, for a number of `rounds`, or along a `schedule` of prompts per round: a prompt ramp.

    Call it on every rank: with rollout="ranks", the last ranks sample. `on_step` is called after every update, on every
    trainer; `on_round` after every round, on every trainer.
    """
    planned = _schedule(plan, rounds, schedule)
    checked = Rounds(plan, planned)  # every stage is checked before anything starts
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with ExitStack() as stack:
        side = None
        if settings.rollout == "ranks":
            side = stack.enter_context(divided(plan, settings, settings.queue or checked.most_micros))
        if side is not None and side.process is None:
            return serve_rank(task, plan, settings, side, stack.enter_context(StopSignals()))
        process = side.process if side else stack.enter_context(joined(settings.device, settings.strategy))
        assert process is not None
        if process.ranks != plan.data_parallel_size:
            raise PlanError(
                f"the plan has data_parallel_size={plan.data_parallel_size}, and the ranks that train are {process.ranks}. "
                + ("" if side else "Several ranks need rollout='ranks'. ")
                + f"Nearest: {process.ranks}.",
                field="data_parallel_size",
                given=plan.data_parallel_size,
                nearest=(process.ranks,),
            )
        if side is None and process.ranks > 1:
            raise PlanError(
                f"rollout={settings.rollout!r} trains in one process, and there are {process.ranks} ranks. Nearest: 'ranks'.",
                field="rollout",
                given=settings.rollout,
                nearest=("ranks",),
            )
        signals = stack.enter_context(StopSignals())
        loop = None
        try:
            loop = RLLoop(task, planned, settings, process, signals, None, trackers, may_save, on_step)
            loop.plan, loop.side, loop.on_round = plan, side, on_round
            status = loop.run()
        except BaseException as error:
            if loop is not None:
                loop.failed(error)
            tell_failure(side, error)
            if loop is not None:
                with suppress(Exception):
                    loop.close()
            raise
        if process.rank == 0:
            tell_status(side, encode(status))
        loop.close()
        return status


def _schedule(plan: RLPlan, rounds: int | None, schedule: Schedule | None) -> Schedule:
    if (rounds is None) == (schedule is None):
        raise PlanError("give rounds, or a schedule of prompts per round.", field="rounds", given=rounds)
    if schedule is not None:
        return schedule
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise PlanError(f"rounds={rounds!r}: must be at least 1.", field="rounds", given=rounds, nearest=(1,))
    return Constant(plan.prompts_per_round).compile().until(rounds * plan.prompts_per_round)


class RLLoop(Loop):
    """The rounds of a session, on one trainer rank."""

    task: RLTask
    settings: RLSettings
    plan: RLPlan
    side: Side | None
    on_round: OnRound | None
    version: int = 0
    saved_version: int = 0
    """The newest policy that a restart may begin with; no file of a newer one can be used again."""
    updates: Updates | None = None
    rollouts: Rollouts | None = None
    workers: Workers | None = None

    def _train(self) -> str:
        self.version = self.saved_version = self._restored_version()
        if reason := self._asked_to_stop():  # while it was set up
            self.saved_position = self.position  # nothing was trained, so there is nothing to save
            return reason
        schedule = self._limited()
        rounds = Rounds(self.plan, schedule, self.step, self.version)
        feed = self._start(rounds)
        group = self.process.gradients or "auto"
        accumulator = Accumulator(
            self.model,
            group=group,
            max_norm=self.settings.max_norm,
            scaler=self.scaler,
            accumulate_dtype=None if self.settings.strategy == "fsdp2" else self.accumulate_dtype,
        )
        rate, total = self._learning_rate(), schedule.total_steps
        begun = self.step
        while total is None or self.step < total:
            step = schedule.at_step(self.step)
            result = self._round(rounds, step, accumulator, feed, rate, first=self.step == begun)
            if self.on_round is not None:
                self.on_round(result, self.model)
            if reason := self._after(result):
                return reason
        return "end" if self.position == self.schedule.total_samples else "boundary"

    def _restored_version(self) -> int:
        if self.saved is None:
            return 0
        version = self.saved.state.get("updates")
        if not isinstance(version, int):
            raise RunError(
                f"checkpoint {self.saved.name} is not one of train_rl: it has no number of updates. Nothing was changed; start "
                "in another directory.",
                field="directory",
                given=self.settings.directory,
            )
        return version

    def _start(self, rounds: Rounds) -> Feed:
        """Take over finished responses, open the record of updates, start the workers and give them the policy."""
        assert self.ledger is not None
        kept: dict[Piece, float | None] = {}
        discarded, leads, generations = 0, self.process.rank == 0, self.plan.generations_per_prompt
        block = weights_of(self.model, keep=leads)  # on all trainers, for FSDP2
        self.responses = Responses(self.settings.root, self.launch, generations, conditions=self._conditions())
        if leads:
            total = rounds.schedule.total_samples

            def usable(piece: Piece) -> bool:
                first, last = piece.positions[0], piece.positions[-1]
                if first < self.position or (total is not None and last >= total) or piece.version > self.version:
                    return False
                step = rounds.schedule.at_sample(first)
                # One of an earlier schedule may reach into the next round, which needs a newer policy.
                return last < step.end_sample and piece.version >= rounds.oldest(step.step)

            kept, discarded = self.responses.adopt(usable, self.version, digest_of(block), self.position)
        self.updates = Updates(
            self.settings.ledger,
            launch=self.launch,
            rank=self.process.rank,
            generations=generations,
            ranks=self.process.ranks,
            position=self.position,
            version=self.version,
            updates_per_pass=self.plan.updates_per_pass,
            updates_per_round=self.plan.updates_per_round,
            worst_policy_lag_updates=self.plan.worst_policy_lag_updates,
            kept_responses=sum(len(piece.positions) for piece in kept) * generations,
            discarded_responses=discarded,
        )
        if leads:
            self.emit("rollout", kept_prompts=sum(len(p.positions) for p in kept), discarded_responses=discarded)
            size = size_of(self.model)
            if self.side is not None:
                begun = {"launch": self.launch, "conditions": self.responses.conditions, "order": asdict(self.order)}
                self.side.store.set(LAUNCH, json.dumps(begun))
                self.workers = on_ranks(self.side, size)
            else:
                sampler = Sampler(self.task, self.model, self.order, self.responses, self.settings)
                self.workers = (in_a_thread if self.settings.rollout == "thread" else in_processes)(sampler, size)
            self.rollouts = Rollouts(rounds, self.responses, self.workers, self.settings, self.emit, kept)
            self.rollouts.publish(self.version, block)
        ours = (self.task, self.order, self.responses, self.ledger, self.updates)
        return Feed(*ours, self.process.rank, self.rollouts, self.side)

    def _conditions(self) -> str:
        """A digest of what finished responses depend on, beside the weights of their policy and the user's code."""
        facts = {name: self.facts[name] for name in ("dataset_size", "dataset", "seed", "shuffle", "model")}
        text = json.dumps({**facts, "generations": self.plan.generations_per_prompt}, sort_keys=True)
        return sha256(text.encode()).hexdigest()[:32]

    def _round(
        self,
        rounds: Rounds,
        step: Step,
        accumulator: Accumulator,
        feed: Feed,
        rate: Callable[[int], float],
        *,
        first: bool,
    ) -> RoundResult:
        clock, plan = Clock(f"trainer {self.process.rank}"), rounds.plan_of(step.global_batch_size)
        before = self.tokens
        if self.rollouts is not None:
            self.rollouts.advance(step.start_sample)
            if not self.settings.overlap:
                self.rollouts.pieces(range(step.start_sample, step.end_sample))
                clock.add("wait", clock.begin)
        made: list[tuple[StepResult, int]] = []
        for update in rounds.updates(step):
            made.append((self._update(update, plan, step, accumulator, feed, rate, clock), feed.lag))
        if step.end_sample != rounds.schedule.total_samples:  # else nobody samples any more
            begin = clock.now()
            block = weights_of(self.model, keep=self.rollouts is not None)
            if self.rollouts is not None:
                self.rollouts.publish(self.version, block)
            clock.add("publish", begin)
        lag = max(lag for _, lag in made)
        return self._record(step, plan, made[-1][0], clock, lag, self.tokens - before, first=first)

    def _update(
        self,
        update: Update,
        plan: RLPlan,
        step: Step,
        accumulator: Accumulator,
        feed: Feed,
        rate: Callable[[int], float],
        clock: Clock,
    ) -> StepResult:
        assert self.updates is not None
        self._present = update
        result: StepResult | None = None
        for gradient in accumulator.steps(feed.micros(update, plan, step, clock)):
            for micro in gradient:
                batch = micro.data
                begin = clock.now()
                gradient.backward(*self.task.loss_of(self.model, to_device(batch, self.process.device)))
                clock.add("train", begin)
            begin = clock.now()
            result = gradient.apply(self.optimizer, learning_rate=rate)
            clock.add("update", begin)
        assert result is not None
        result = replace(result, end_sample=update.prompts.stop)  # it counts responses, and positions are prompts
        self._dropped = 0
        if self.rollouts is not None and update.number == plan.updates_per_round - 1:
            self._dropped, self.rollouts.dropped = self.rollouts.dropped, 0
        self.updates.applied(update.version, update.round, update.prompts, self._dropped)
        feed.applied()
        self.version = update.version + 1
        self._count(result.loss, result.weight)
        self.skipped_steps += result.skipped
        self.emit(
            "update",
            update=update.version,
            round=update.round,
            samples=update.prompts.stop,
            prompts=len(update.prompts),
            responses=result.samples,
            loss=result.loss,
            auxiliary=result.auxiliary,
            weight=result.weight,
            grad_norm=result.grad_norm,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            policy_lag=feed.lag,
            outcome=result.outcome,
        )
        if self.on_step is not None:
            self.on_step(result, self.model, self.optimizer)
        self._check_finite()
        return result

    def _last_step(self) -> str:
        one = self._present
        prompts = f"the prompts at positions {one.prompts.start:,} to {one.prompts.stop:,}"
        return f"update {one.version:,}, of round {one.round:,}, which has {prompts}"

    def _record(
        self, step: Step, plan: RLPlan, result: StepResult, clock: Clock, lag: int, tokens: float, *, first: bool
    ) -> RoundResult:
        """Write what a round was to the ledger and the events; the position advances."""
        assert self.ledger is not None
        self.ledger.applied(step.step, step.start_sample, step.global_batch_size)
        self.position, self.step = step.end_sample, step.step + 1
        sampled, reward = list[dict[str, Any]](), None
        if self.rollouts is not None:
            sampled, self.rollouts.sampled = self.rollouts.sampled, []
            reward = self.rollouts.reward(step)
            for piece in self.rollouts.trained(step):
                if piece.version > self.saved_version:
                    self.responses.retire(piece)
            self.rollouts.forget(self.position)
        made = RoundResult(
            round=step.step,
            first_prompt=step.start_sample,
            prompts=step.global_batch_size,
            responses=plan.responses_per_round,
            dropped_responses=self._dropped,
            policy_version=self.version,
            policy_lag=lag,
            loss=result.loss,
            reward=reward,
            seconds=clock.now() - clock.begin,
            rollout_seconds=sum(answer["end"] - answer["begin"] for answer in sampled),
            train_seconds=clock.total("train") + clock.total("update"),
            wait_seconds=clock.total("wait"),
        )
        self.waited_seconds += made.wait_seconds
        shown = step.step % self.settings.log_every == 0 or first
        # The numbers of the first trainer, and the spans of all.
        of_ranks = self.process.gathered((made, clock.spans if shown else []))
        made = of_ranks[0][0]
        if shown and self.events is not None:
            spans = [span for _, spans in of_ranks for span in spans]
            spans += [(f"rollout {one['worker']}", "rollout", one["begin"], one["end"]) for one in sampled]
            self.emit("round", samples=self.position, **round_event(made, clock.begin, spans))
            self.emit("step", now=first, **self._step_values(step, plan, result, made, tokens))
        return made

    def _step_values(
        self, step: Step, plan: RLPlan, result: StepResult, made: RoundResult, tokens: float
    ) -> dict[str, Any]:
        """A round as a `step` event, which progress bars, trackers and charts of any run know."""
        return dict(
            step=step.step,
            samples=self.position,
            tokens=self.tokens,
            loss=result.loss,
            auxiliary=result.auxiliary,
            global_batch_size=step.global_batch_size,
            micro_batch_size=plan.train_micro_responses,
            accumulation_steps=plan.accumulation_steps,
            samples_per_second=made.prompts / made.seconds,
            tokens_per_second=tokens / made.seconds,
            step_seconds=made.seconds,
            wait_seconds=made.wait_seconds,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            grad_norm=result.grad_norm,
            stage=step.segment,
            nodes=self.settings.nodes,
            ranks=self.process.ranks,
            outcome=result.outcome,
            loss_scale=self.scaler.get_scale() if self.scaler else None,
            reward=made.reward,
            policy_lag=made.policy_lag,
            responses=made.responses,
            dropped_responses=made.dropped_responses,
        )

    def _asked_to_stop(self) -> str | None:
        """The reason to stop, if any rank has got a signal or the tokens are trained."""
        if self.side is not None and self.process.rank == 0 and self.side.store.check([SIGNAL]):
            self.signals.received = self.signals.received or int(self.side.store.get(SIGNAL))
        return self._stop_reason(self.process.maximum(self.signals.received))

    def _after(self, made: RoundResult) -> str | None:
        """Save, or the reason to stop, after a round."""
        if reason := self._asked_to_stop():
            return reason
        if (
            self._crossed(self.settings.checkpoint_every, made.first_prompt)
            and not self._at_end()
            and not self._broken()
        ):
            self._save()
        return None

    def more_state(self) -> dict[str, Any]:
        """The number of updates that the weights of a checkpoint have had."""
        return {"updates": self.version}

    def _save(self, *, wait: bool = False) -> None:
        if self.updates is not None:
            self.updates.sync()
        super()._save(wait=wait)
        self.saved_version = self.version

    def _saved(self, saved: Saved | None, seconds: float) -> None:
        super()._saved(saved, seconds)
        if saved is not None and self.rollouts is not None:
            self.responses.forget(saved.position)

    def close(self) -> None:
        """Let the workers end, and close the files."""
        with ExitStack() as stack:
            stack.callback(super().close)
            if self.updates is not None:
                stack.callback(self.updates.close)
            if self.workers is not None:
                stack.callback(self.workers.stop)
