"""One line added to a script of transformers' Trainer: the same weights, the same files, less memory."""

import pytest
import torch

from blockhooks import Checkpoint, attach, memory
from tests.models.toys import same

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

LENGTH, TOKENS = 32, 64


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        tokens = torch.randint(TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(folder, hooks, resume=None, **options):
    """Train a small GPT-2 for four steps, and give back its trainer, its handle, and the peak of live bytes."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=6, n_head=4, n_positions=LENGTH, vocab_size=TOKENS
    )
    model = transformers.GPT2LMHeadModel(config)
    handle = attach(model, hooks)
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"save_strategy": "no", **options},
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Text(), eval_dataset=Text())
    with memory.peak("cpu") as meter:
        trainer.train(resume_from_checkpoint=resume)
    return trainer, handle, meter.peak


def told(trainer):
    """What the trainer has logged, but for times."""
    return [
        {
            name: value
            for name, value in line.items()
            if "runtime" not in name and "second" not in name
        }
        for line in trainer.state.log_history
    ]


SCRIPTS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 1},
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_training_ends_with_the_same_weights_in_less_memory(script, tmp_path):
    plain, _, plain_peak = train(tmp_path, [], **SCRIPTS[script])
    hooked, handle, hooked_peak = train(tmp_path, [Checkpoint()], **SCRIPTS[script])
    assert same(plain.model.state_dict(), hooked.model.state_dict())
    assert told(plain) == told(hooked)
    assert hooked_peak < plain_peak / 2
    blocks = handle.report().stacks[0]["blocks"]
    assert [block["done"] for block in blocks] == ["recomputed"] * 6


def test_what_a_run_saves_is_resumed_with_hooks_and_without(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    plain, _, _ = train(tmp_path / "plain", [], **options)
    train(tmp_path / "hooked", [Checkpoint()], **options)
    saved = {
        name: torch.load(tmp_path / name / "checkpoint-2" / "optimizer.pt")
        for name in ("plain", "hooked")
    }
    assert same(saved["plain"], saved["hooked"])
    for source in ("plain", "hooked"):
        for hooks in ([], [Checkpoint()]):
            folder = tmp_path / f"{source}-{len(hooks)}"
            resumed, _, _ = train(folder, hooks, tmp_path / source / "checkpoint-2", **options)
            assert list(resumed.model.state_dict()) == list(plain.model.state_dict())
            assert same(plain.model.state_dict(), resumed.model.state_dict())
