"""A script for causal language models as people write it with transformers: it knows nothing of batchwright.

Three dataclasses of arguments, a dataset that is tokenized and then cut into blocks of one length, the Trainer, and an
evaluation and a saved model at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    config_name: str
    tokenizer_name: str


@dataclass
class DataArguments:
    train_file: str
    block_size: int = 128


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_args.config_name))
    raw = load_dataset("json", data_files={"train": data_args.train_file})["train"]

    def blocks(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(examples["input_ids"]))
        length = data_args.block_size
        cut = [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
        return {"input_ids": cut, "labels": cut}

    tokenized = raw.map(
        lambda examples: {"input_ids": tokenizer(examples["text"])["input_ids"]},
        batched=True,
        remove_columns=raw.column_names,
        desc="Running tokenizer on dataset",
    )
    grouped = tokenized.map(blocks, batched=True, desc=f"Grouping texts in chunks of {data_args.block_size}")
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=grouped,
        eval_dataset=grouped.select(range(8)),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model()


if __name__ == "__main__":
    main()
