"""The adapter for transformers' Trainer: what a loss is a mean over, and the test of the loss in the first step."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F

import batchwright
from batchwright.core.errors import RunError
from batchwright.runtime import Task
from tests.adapters.test_huggingface import error, whole
from tests.needs import needs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
ONE_STEP = batchwright.Constant(32).compile().until(32)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def exact(hf):
    from batchwright.adapters.huggingface import exact

    return exact


def labelled(count, least=3, most=24):
    """Rows whose labels are their tokens: the model shifts them, or not."""
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(least, most + 1, (count,), generator=drawn).tolist()
    tokens = [torch.randint(1, 32, (n,), generator=drawn).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in tokens]


BERT = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}
XL = {"vocab_size": 32, "dropout": 0}
MODELS = {  # class, configuration, and whether its loss leaves out the first label of each row
    "GPT2LMHeadModel": ("GPT2Config", {**GPT, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, True),
    "BertLMHeadModel": ("BertConfig", {**BERT, **OFF, "is_decoder": True}, True),
    "BertForMaskedLM": ("BertConfig", {**BERT, **OFF}, False),
    "BertForTokenClassification": ("BertConfig", {**BERT, **OFF, "num_labels": 32}, False),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", {**GPT, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}, True),
    "CTRLLMHeadModel": ("CTRLConfig", {**GPT, "dff": 32, "resid_pdrop": 0, "embd_pdrop": 0}, True),
    "BertGenerationDecoder": ("BertGenerationConfig", {**BERT, **OFF, "is_decoder": True}, True),
    "XLNetLMHeadModel": ("XLNetConfig", {**XL, "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 32}, False),
    "XLMWithLMHeadModel": ("XLMConfig", {**XL, "emb_dim": 16, "n_layers": 1, "n_heads": 2, "attention_dropout": 0}, False),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0,
         "decoder_start_token_id": 0},
        False,
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0, "pad_token_id": 0,
         "decoder_start_token_id": 1},
        False,
    ),
}  # fmt: skip
FEW = ("GPT2LMHeadModel", "BertLMHeadModel")


def model_of(name):
    import transformers

    config, settings, _ = MODELS[name]
    return getattr(transformers, name)(getattr(transformers, config)(**settings))


@pytest.mark.parametrize("micro", [4, 1])
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.rounds) for name in MODELS]
)
def test_the_default_weight_is_right_for_every_kind_of_model(hf, exact, tmp_path, name, micro):
    """Whatever the name of the class says: GPT-2 has none that tells that its loss shifts labels."""
    from transformers import Trainer

    data, model = labelled(24, 3, 24), model_of(name)
    args = hf.arguments(tmp_path, per_device_train_batch_size=micro, learning_rate=1e-9)
    schedule = batchwright.Thresholds([(0, 8), (8, 16)]).compile().until(24)
    before = copy.deepcopy(model)
    trainer, watch = hf.trained(exact(Trainer), model, data, args, schedule=schedule)
    for ids, gradient in zip(watch.ids, watch.gradients, strict=True):
        assert error(gradient, whole(before, hf.collate([data[i] for i in ids]))) <= 1e-5
    assert trainer._Exact__chosen is trainer._Exact__weights[MODELS[name][2]]


def test_long_rows_are_weighed_exactly(hf, exact, tmp_path):
    """Where one label of a row counts for little: a weight that is wrong by it was accepted at 1% of the gradient."""
    from transformers import Trainer

    data, model = labelled(32, 20, 200), model_of("GPT2LMHeadModel")
    reference = whole(model, hf.collate(data))
    _, watch = hf.trained(exact(Trainer), copy.deepcopy(model), data, hf.arguments(tmp_path / "a"), schedule=ONE_STEP)
    assert error(watch.gradients[0], reference) <= 1e-5

    def near(batch):
        return (batch["labels"] != -100).sum()

    with pytest.raises(RunError, match="It fits a mean over labels that are not -100, without the first of each row"):
        hf.trained(exact(Trainer), model, data, hf.arguments(tmp_path / "b"), schedule=ONE_STEP, weight=near)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.rounds)])
@pytest.mark.parametrize("name", ["BertForMaskedLM", pytest.param("GPT2LMHeadModel", marks=pytest.mark.rounds)])
def test_gradient_checkpointing_with_dropout(hf, exact, tmp_path, name, reentrant):
    import transformers
    from transformers import Trainer

    settings = BERT if name.startswith("Bert") else GPT  # with their default dropout of 0.1
    model = getattr(transformers, name)(getattr(transformers, MODELS[name][0])(**settings))
    given = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer, _ = hf.trained(exact(Trainer), model, labelled(32), hf.arguments(tmp_path, **given), schedule=ONE_STEP)
    assert trainer.batchwright.done and trainer.model.is_gradient_checkpointing


def test_noise_on_embeddings_is_switched_off_for_the_test_alone(hf, exact, tmp_path):
    """NEFTune: the scale of its noise depends on the padded length."""
    from transformers import Trainer

    found = []

    class Seen(hf.Watch):
        def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
            found.append(model.get_input_embeddings().neftune_noise_alpha)

    args = hf.arguments(tmp_path, neftune_noise_alpha=5.0)
    exact(Trainer)(
        hf.llama(), args=args, train_dataset=hf.rows(32), data_collator=hf.collate, callbacks=[Seen()], schedule=ONE_STEP
    ).train()  # fmt: skip
    assert found == [5.0]


def test_lora(hf, exact, tmp_path):
    needs("peft")
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer

    model = get_peft_model(hf.llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    data = hf.rows(32)
    reference = whole(model, hf.collate(data))
    args = hf.arguments(tmp_path, save_strategy="steps", save_steps=1)
    _, watch = hf.trained(exact(Trainer), model, data, args, schedule=ONE_STEP)
    assert all("lora_" in name for name in reference) and error(watch.gradients[0], reference) <= 1e-5
    longer = batchwright.Constant(32).compile().until(64)
    again, rest = hf.trained(exact(Trainer), model, data, args, resume=True, schedule=longer)
    assert len(rest.ids) == 1 and again.batchwright.done


def test_the_names_of_the_users_class_are_free(hf, exact, tmp_path):
    class Scaled(hf.OwnLoss):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self._scale, self._weight, self._group, self._stop = 0.5, torch.ones(3), "mine", "mine"

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs) * self._scale

    model, data = hf.Ignoring(), hf.rows(32)
    reference = {name: gradient / 2 for name, gradient in whole(model, hf.collate(data)).items()}
    trainer, watch = hf.trained(exact(Scaled), model, data, hf.arguments(tmp_path), schedule=ONE_STEP)
    assert error(watch.gradients[0], reference) <= 1e-5
    assert (trainer._scale, trainer._group, trainer._stop) == (0.5, "mine", "mine")


def test_a_loss_function_of_the_user(hf, exact, tmp_path):
    """On labels that are shifted already: the name of the model's class says that its loss shifts them."""
    from transformers import Trainer

    def mean(outputs, labels, num_items_in_batch=None):
        total = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / (num_items_in_batch or (labels != -100).sum())

    def dividing(outputs, labels, num_items_in_batch=None):
        return mean(outputs, labels) / num_items_in_batch

    model, data = hf.llama(), hf.rows(32)
    alone = copy.deepcopy(model).double()
    batch = hf.collate(data)
    mean(alone(batch["input_ids"], batch["attention_mask"]), batch["labels"]).backward()
    given = {"schedule": ONE_STEP, "compute_loss_func": mean}
    _, watch = hf.trained(exact(Trainer), model, data, hf.arguments(tmp_path / "a"), **given)
    assert error(watch.gradients[0], {name: p.grad for name, p in alone.named_parameters()}) <= 1e-5
    with pytest.raises(
        RunError, match=r"compute_loss_func may need num_items_in_batch, which is None.*return that mean"
    ):
        hf.trained(
            exact(Trainer), model, data, hf.arguments(tmp_path / "b"), **{**given, "compute_loss_func": dividing}
        )


def test_a_sum_over_one_label_per_row_is_refused_with_its_reason(hf, exact, tmp_path):
    """Classification, where no label is the first of a row."""
    from transformers import Trainer

    class Summed(hf.Ignoring):
        def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
            logits = self.head(torch.tanh(self.embedding(input_ids).mean(1)))
            return {"loss": F.cross_entropy(logits, labels, reduction="sum")}

    def first_tokens(batch):
        made = hf.collate(batch)
        return {**made, "labels": made["input_ids"][:, 0]}

    trainer = exact(Trainer)(
        Summed(), args=hf.arguments(tmp_path), train_dataset=hf.rows(32), data_collator=first_tokens, schedule=ONE_STEP
    )  # fmt: skip
    with pytest.raises(
        RunError, match=r"the loss does not add up.*counts 2 and 2 in the halves.*it is a sum: then divide"
    ):
        trainer.train()


def test_errors_that_are_no_classes_all_count(hf, exact, tmp_path):
    """Regression: the mean of squares takes a label of -100.0 as a number."""
    from transformers import Trainer

    class Regression(hf.Ignoring):
        def forward(self, input_ids, labels=None, attention_mask=None, **kwargs):
            kept = attention_mask.to(self.embedding.weight.dtype)[..., None]
            found = (self.head(torch.tanh(self.embedding(input_ids))) * kept).sum(1)[:, 0]
            return {"loss": F.mse_loss(found, labels.to(found.dtype))}

    def collate(batch):
        made = hf.collate(batch)
        return {**made, "labels": torch.tensor([-100.0 if row["input_ids"][0] % 2 else 1.0 for row in batch])}

    data, watch, model = hf.rows(32), hf.Watch(), Regression()
    reference = whole(model, collate(data))
    exact(Trainer)(
        model, args=hf.arguments(tmp_path), train_dataset=data, data_collator=collate, callbacks=[watch], schedule=ONE_STEP
    ).train()  # fmt: skip
    assert error(watch.gradients[0], reference) <= 1e-5


def mixtral(hf, **given):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **{
            "vocab_size": hf.VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True,
            "router_aux_loss_coef": 0.1, **given,
        }
    )  # fmt: skip
    config._experts_implementation = "eager"  # the default does not run in float64
    return MixtralForCausalLM(config)


def test_a_balance_loss_is_the_only_part_that_is_not_exact(hf, exact, tmp_path, caplog):
    """As docs/huggingface.md says: 1.5%, where the Trainer alone, which adds it 8 times, is off by 37 to 47%."""
    from transformers import Trainer

    data, model = labelled(32, 3, 32), mixtral(hf)
    reference = whole(model, hf.collate(data))
    with caplog.at_level(logging.WARNING, logger="batchwright.adapters.huggingface"):
        _, watch = hf.trained(
            exact(Trainer), copy.deepcopy(model), data, hf.arguments(tmp_path / "a"), schedule=ONE_STEP
        )
    assert ["balance loss of the router" in record.message for record in caplog.records] == [True]
    assert error(watch.gradients[0], reference) == pytest.approx(0.0154, abs=0.002)
    args = hf.arguments(tmp_path / "stock", gradient_accumulation_steps=8, max_steps=1)
    _, watch = hf.trained(Trainer, copy.deepcopy(model), data, args)
    assert 0.2 < error(watch.gradients[0], reference) < 0.6  # by the order of samples
    model.config.output_router_logits = False
    reference = whole(model, hf.collate(data))
    _, watch = hf.trained(exact(Trainer), model, data, hf.arguments(tmp_path / "b"), schedule=ONE_STEP)
    assert error(watch.gradients[0], reference) <= 1e-5


def test_check_names_an_auxiliary_mean_in_a_sum(hf, tmp_path):
    """A model that uses num_items_in_batch, and adds a mean to its sum: the Trainer adds it once per micro batch."""
    from transformers import Trainer

    class Auxiliary(hf.Ignoring):
        def forward(self, input_ids, labels=None, attention_mask=None, num_items_in_batch=None, **kwargs):
            logits = self.head(torch.tanh(self.embedding(input_ids)))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            mean = total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
            return {"loss": mean + 0.1 * self.head.weight.square().mean(), "logits": logits}

    args = hf.arguments(tmp_path, gradient_accumulation_steps=8)
    trainer = Trainer(Auxiliary(), args=args, train_dataset=hf.rows(32), data_collator=hf.collate)
    report = batchwright.check(Task.from_trainer(trainer), global_batch_size=16, micro_batch_sizes=(2,))
    assert [finding.cause for finding in report.findings] == ["auxiliary-scaled"] and not report.ok


def test_check_finds_nothing_in_sft(hf, tmp_path):
    """Its fused loss computes its gradient in backward. Stock, and exact with packing."""
    needs("trl")
    from trl import SFTTrainer

    ours, _ = hf.sft(tmp_path / "ours", batchwright.Constant(4).compile().until(24))
    stock, _ = hf.sft(tmp_path / "stock", None, kind=SFTTrainer, packing=False, gradient_accumulation_steps=4)
    for trainer in (ours, stock):
        report = batchwright.check(Task.from_trainer(trainer), global_batch_size=8, micro_batch_sizes=(2,))
        assert report.ok and not report.findings


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_check_weighs_as_training_does(hf, exact, tmp_path, name):
    from transformers import Trainer

    trainer = exact(Trainer)(
        model_of(name), args=hf.arguments(tmp_path), train_dataset=labelled(32), data_collator=hf.collate, schedule=ONE_STEP
    )  # fmt: skip
    report = batchwright.check(Task.from_trainer(trainer), global_batch_size=16, micro_batch_sizes=(2,))
    assert report.ok and not report.findings


def test_a_task_runs_the_model_as_the_trainer_does(hf, tmp_path, mixed):
    from transformers import Trainer

    args = hf.arguments(tmp_path, bf16=True, gradient_checkpointing=True, max_steps=1)
    trainer = Trainer(hf.llama(), args=args, train_dataset=hf.rows(8), data_collator=hf.collate)
    task, seen = Task.from_trainer(trainer), []
    model = task.build_model(0).train()
    model.lm_head.register_forward_hook(lambda _, __, out: seen.append((out.dtype, model.is_gradient_checkpointing)))
    task.loss(model, task.collate([task.dataset[0]]))
    trainer.train()
    assert set(seen) == {(torch.bfloat16, True)}
