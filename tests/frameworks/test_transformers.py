"""The Trainer of transformers, and TRL's: the same weights in less memory, and it is said."""

import logging

import pytest
import torch
from torch.utils.data import Dataset

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import elbowroom as er  # noqa: E402
from elbowroom.errors import BudgetTooSmall, PlanError  # noqa: E402
from elbowroom.integrations.transformers import Budget  # noqa: E402
from elbowroom.runtime.attach import attached  # noqa: E402

TOKENS = 128


class Text(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=3, n_head=4)
    return GPT2LMHeadModel(config)


def trained(tmp_path, *callbacks, model=None, resume=None, front=None, **arguments):
    settings = {
        "per_device_train_batch_size": 8,
        "max_steps": 14,
        "logging_steps": 7,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    args = TrainingArguments(str(tmp_path), **settings | arguments)
    model = gpt2() if model is None else model
    trainer = Trainer(
        model, args, train_dataset=Text(), eval_dataset=Text(), callbacks=list(callbacks)
    )
    if front is not None:
        front(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def same_weights(one, other):
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def inside_a_tight_budget(run, share=0.75):
    """Run with a budget below what plain training takes; if it is refused, with what is named."""
    ample = Budget("60 GiB", exact=True)
    run(ample)
    callback = Budget(int(share * ample.summary.last_nbytes), exact=True)
    try:
        return run(callback), callback.summary
    except BudgetTooSmall as error:
        callback.on_train_end(None, None, None)
        callback = Budget(error.least_nbytes, exact=True)
        return run(callback), callback.summary


WAYS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 5},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_weights_inside_a_tight_budget(way, tmp_path, caplog):
    arguments = WAYS[way]
    plain = trained(tmp_path, **arguments)
    with caplog.at_level(logging.INFO, "elbowroom"):
        ours, told = inside_a_tight_budget(lambda one: trained(tmp_path, one, **arguments))
    assert same_weights(plain, ours)
    assert told.exact
    assert told.last_nbytes <= told.budget_nbytes
    assert "was kept" in caplog.text
    assert not attached()  # released


def test_a_compiled_model_stays_compiled(tmp_path, caplog):
    def small(*callbacks):
        torch._dynamo.reset()
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=256, n_positions=TOKENS, n_embd=32, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config)
        settings = {"model": model, "torch_compile": True, "max_steps": 3}
        return trained(tmp_path, *callbacks, **settings)

    callback = Budget("60 GiB", exact=True)
    with caplog.at_level(logging.INFO, "elbowroom"):
        assert same_weights(small(), small(callback))
    assert "planned inside torch.compile" in caplog.text
    assert callback.summary.setting == "compiled"
    assert callback.summary.predicted_nbytes
    assert not attached()


def test_the_figures_are_in_the_log_and_loggers_are_given_them(tmp_path):
    seen = []

    class Logger(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = trained(tmp_path, Logger(), front=lambda trainer: Budget.of(trainer, "60 GiB"))
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert history
    for entry in (history[-1], [logs for logs in seen if "loss" in logs][-1]):
        assert entry["memory/budget_mib"] == 60 * 1024
        assert 0 < entry["memory/peak_mib"] < 1024
        assert entry["memory/exact"] == 1.0
        assert all(isinstance(n, float) for name, n in entry.items() if name.startswith("memory/"))


def test_the_log_may_be_left_as_it_is(tmp_path):
    trainer = trained(tmp_path, front=lambda trainer: Budget.of(trainer, "60 GiB", logs=False))
    assert trainer.state.log_history
    for entry in trainer.state.log_history:
        assert not any(name.startswith("memory/") for name in entry)


def test_a_resumed_training_goes_on_with_the_same_weights(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 7}
    whole = trained(tmp_path / "a", Budget("60 GiB", exact=True), **saves)
    resumed = trained(
        tmp_path / "b",
        Budget("60 GiB", exact=True),
        resume=str(tmp_path / "a" / "checkpoint-7"),
        **saves,
    )
    assert same_weights(whole, resumed)


def test_one_callback_serves_one_training_after_another(tmp_path):
    callback = Budget("60 GiB")
    first = trained(tmp_path, callback, max_steps=2)
    second = trained(tmp_path, callback, max_steps=2)
    assert same_weights(first, second)


def test_a_callback_that_is_in_use_is_refused(tmp_path):
    callback = Budget("60 GiB")
    callback.on_train_begin(TrainingArguments(str(tmp_path)), None, None, model=gpt2())
    with pytest.raises(PlanError, match="one of its own"):
        trained(tmp_path, callback, max_steps=2)
    callback.on_train_end(None, None, None)


@pytest.mark.parametrize("by", ["an interrupt", "a Trainer that finds its batch size"])
def test_a_training_that_was_stopped_begins_again(by, tmp_path):
    itself = by != "an interrupt"  # with half the batch, if memory has run out
    error = (
        RuntimeError("DefaultCPUAllocator: can't allocate memory") if itself else KeyboardInterrupt
    )

    class Stops(TrainerCallback):
        stops = True

        def on_step_end(self, args, state, control, **kwargs):
            if self.stops and state.global_step == 2:
                self.stops = False
                raise error

    def front(trainer):
        if not itself:
            with pytest.raises(KeyboardInterrupt):
                trainer.train()

    callback = Budget("60 GiB", exact=True)
    settings = {"max_steps": 4, "auto_find_batch_size": itself}
    trained(tmp_path, Stops(), callback, front=front, **settings)
    assert callback.summary.steps > 0
    assert not attached()


def test_a_budget_that_nothing_meets_is_named_with_what_would_do(tmp_path):
    with pytest.raises(BudgetTooSmall, match=r"[Gg]ive budget="):
        trained(tmp_path, Budget("1 MiB", exact=True))
    for model, _ in attached():
        er.release(model)


def test_lora_with_trl(tmp_path):
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([Text()[i] for i in range(64)])

    def run(*callbacks):
        torch.manual_seed(0)
        config = trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=8,
            max_steps=14,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            gradient_checkpointing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trl.SFTTrainer(
            gpt2(),
            config,
            train_dataset=data,
            processing_class=Tokens(),
            peft_config=peft.LoraConfig(
                r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
            ),
            callbacks=list(callbacks),
        )
        trainer.train()
        return trainer

    plain, (ours, told) = run(), inside_a_tight_budget(run)
    assert same_weights(plain, ours)
    assert told.last_nbytes <= told.budget_nbytes


def Tokens():
    """A tokenizer of bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {chr(i): i for i in range(256)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=chr(0)))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=chr(1), pad_token=chr(2)
    )
