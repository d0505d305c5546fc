"""Published ramps as data, each with its source. A note says what a report does not specify.

The numbers are those of the report. If its batch in tokens is not a whole number of sequences, the recipe has the
nearest whole size, and a note has the printed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from batchwright.core.errors import ScheduleError

from .rules import Linear, Thresholds
from .schedule import Rule, Schedule

B = 10**9
T = 10**12


@dataclass(frozen=True)
class PublishedStage:
    """What a report says about one stage: its nodes and its speed.

    >>> recipe("nemotron-4-15b").stages[0].nodes
    96
    """

    global_batch_size: int
    tokens: int
    nodes: int
    data_parallel_size: int
    iteration_seconds: float
    days: float


@dataclass(frozen=True)
class Recipe:
    """A published ramp: the rule, the budget if the report gives one, and notes on what it does not specify.

    >>> recipe("palm-540b").schedule().total_steps
    255000
    """

    name: str
    title: str
    source: str
    rule: Rule
    sequence_length: int | tuple[int, ...]
    samples: int | None = None  # the budget, in one of the two units
    tokens: int | None = None
    notes: tuple[str, ...] = ()
    stages: tuple[PublishedStage, ...] = ()
    samples_per_replica: int | None = None  # per optimizer step
    tensor_parallel: int | None = None
    devices_per_node: int | None = None

    def schedule(self) -> Schedule:
        """The compiled schedule, with the recipe's notes, up to its budget.

        >>> [(s.global_batch_size, s.sequence_length) for s in recipe("llama-3-405b").schedule().segments]
        [(977, 4096), (977, 8192), (1953, 8192)]
        """
        compiled = self.rule.compile()
        compiled = Schedule(compiled.segments, self.notes + compiled.notes)
        if self.samples is None and self.tokens is None:
            return compiled
        return compiled.until(self.samples, tokens=self.tokens)


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="palm-540b",
        title="PaLM 540B",
        source="Chowdhery et al. 2022, PaLM: Scaling Language Modeling with Pathways, arXiv:2204.02311",
        rule=Thresholds(((0, 512), (50_000, 1024), (115_000, 2048)), unit="steps", sequence_length=2048),
        sequence_length=2048,
        # Published as an end at step 255,000: 50,000 × 512 + 65,000 × 1024 + 140,000 × 2048.
        samples=378_880_000,
    ),
    Recipe(
        name="llama-3-405b",
        title="Llama 3 405B",
        source="Llama Team 2024, The Llama 3 Herd of Models, arXiv:2407.21783",
        rule=Thresholds(
            ((0, 977), (252_000_000, 977), (2_870 * B, 1953)), unit="tokens", sequence_length=(4096, 8192, 8192)
        ),
        sequence_length=(4096, 8192, 8192),
        notes=(
            "Published as 4M, 8M and 16M tokens, which are 976.5625, 976.5625 and 1953.125 sequences; these are the "
            "nearest whole sizes. If the report's M is 2^20, they are 1024, 1024 and 2048.",
            "The change at 252M tokens doubles the sequence length, 4096 to 8192, not the sequences per batch.",
        ),
    ),
    Recipe(
        name="deepseek-v3",
        title="DeepSeek-V3",
        source="DeepSeek-AI 2024, DeepSeek-V3 Technical Report, arXiv:2412.19437",
        rule=Linear(start=3072, increment=768, samples=469 * B // 4096, target=15360, sequence_length=4096),
        sequence_length=4096,
        tokens=14_800 * B,  # the report's abstract
        notes=(
            "Published as gradual, from 3072 to 15360 in the first 469B tokens; the shape is not published. Here: linear, "
            "in 16 increments of 768, over 114,501,953 samples (469B tokens / 4096, rounded down).",
        ),
    ),
    Recipe(
        name="bloom-176b",
        title="BLOOM 176B",
        source="BigScience 2022, bigscience-workshop/bigscience, tr11-176B-ml training script",
        rule=Linear(start=192, increment=16, samples=9_765_625, target=2048, sequence_length=2048),
        sequence_length=2048,
    ),
    Recipe(
        name="mt-nlg-530b",
        title="MT-NLG 530B",
        source="Smith et al. 2022, Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, arXiv:2201.11990",
        rule=Linear(start=32, increment=32, samples=12 * B // 2048, target=1920, sequence_length=2048),
        sequence_length=2048,
        notes=("Published as 12B tokens of ramp: 5,859,375 samples of 2048.",),
    ),
    Recipe(
        name="nemotron-4-15b",
        title="Nemotron-4 15B",
        source="Parmar et al. 2024, Nemotron-4 15B Technical Report, arXiv:2402.16819",
        rule=Thresholds(((0, 384), (200 * B, 768), (400 * B, 1152)), unit="tokens", sequence_length=4096),
        sequence_length=4096,
        tokens=8 * T,
        stages=(
            PublishedStage(384, 200 * B, 96, 96, 0.57, 0.8),
            PublishedStage(768, 200 * B, 192, 192, 0.58, 0.4),
            PublishedStage(1152, 7_600 * B, 288, 288, 0.64, 11.9),
        ),
        samples_per_replica=4,
        tensor_parallel=8,
        devices_per_node=8,
    ),
    Recipe(
        name="olmo-1b-warmup",
        title="OLMo 1B batch size warm-up",
        source="Merrill et al. 2025, Critical Batch Size Revisited, arXiv:2505.23971",
        rule=Thresholds(((0, 1024), (168 * B, 2048), (503 * B, 4096)), unit="tokens", sequence_length=4096),
        sequence_length=4096,
        notes=("The report multiplies the learning rate by √2 at each doubling.",),
    ),
)


def recipe(name: str) -> Recipe:
    """The published ramp with this name.

    >>> recipe("bloom-176b").title
    'BLOOM 176B'
    """
    found = {r.name: r for r in RECIPES}
    if name in found:
        return found[name]
    close = get_close_matches(name.lower(), found, n=2, cutoff=0.3)
    raise ScheduleError(
        f"recipe={name!r} is not one of {', '.join(found)}." + (f" Nearest: {' or '.join(close)}." if close else ""),
        field="recipe",
        given=name,
        nearest=close or tuple(found),
    )
