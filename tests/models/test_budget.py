"""A memory budget on an unmodified model is one of the whole step, and each step is the plain one, bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from blockhooks import Checkpoint, attach, budget, memory, plan
from tests.models.toys import Pyramid

LENGTHS = (48, 64, 48, 96, 64, 48, 96, 64, 80, 80)
VOCABULARY = 256


def transformer(name, head, **config):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**config))


def gpt2(**more):
    return transformer(
        "GPT2", "LMHeadModel", n_embd=64, n_layer=5, n_head=4, vocab_size=VOCABULARY, **more
    )


def llama(**more):
    return transformer(
        "Llama", "ForCausalLM", hidden_size=64, intermediate_size=160, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCABULARY, **more,
    )  # fmt: skip


def t5(**more):
    return transformer(
        "T5", "ForConditionalGeneration", d_model=64, d_kv=16, d_ff=160, num_layers=3, num_heads=4,
        vocab_size=VOCABULARY, decoder_start_token_id=0, **more,
    )  # fmt: skip


def vit():
    return transformer(
        "ViT", "ForImageClassification", hidden_size=64, num_hidden_layers=5, num_attention_heads=4,
        intermediate_size=256, image_size=32, patch_size=4, num_labels=10,
        hidden_dropout_prob=0.1,
    )  # fmt: skip


def tokens(*shape):
    return torch.randint(1, VOCABULARY, shape)


def causal(length):
    text = tokens(4, length)
    return {"input_ids": text, "labels": text}


def translation(length):
    return {"input_ids": tokens(4, length), "labels": tokens(4, length // 2)}


def images(length):
    return {"pixel_values": torch.randn(length // 8, 3, 32, 32)}


def patches(length):
    return {"x": torch.randn(length // 4, 256, 48)}


def inside(model, given):
    return model(**given).loss


def outside(model, given):
    output = model(**{name: value for name, value in given.items() if name != "labels"})
    logits = output if isinstance(output, torch.Tensor) else output.logits
    target = given.get("labels", torch.arange(len(logits)) % 10)
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


MODELS = {
    "gpt2": (gpt2, causal, inside),
    "gpt2, loss outside": (gpt2, causal, outside),
    "llama": (llama, causal, inside),
    "llama, loss outside": (llama, causal, outside),
    "t5": (t5, translation, inside),
    "vit": (vit, images, outside),
    "pyramid": (Pyramid, patches, outside),
}


class Training:
    """A model and what its plain step is at each length."""

    def __init__(self, name, new_gradients, lengths=LENGTHS):
        torch.manual_seed(0)
        make, self.inputs, self.loss = MODELS[name]
        self.model, self.new_gradients = make().train(), new_gradients
        self.plain = {length: self.step(length) for length in sorted(set(lengths))}

    def step(self, length):
        """Peak of live bytes, and loss and gradients, of one step from fixed seeds."""
        for parameter in self.model.parameters():
            parameter.grad = None if self.new_gradients else torch.zeros_like(parameter)
        torch.manual_seed(length)
        given = self.inputs(length)
        with memory.peak("cpu") as meter:
            loss = self.loss(self.model, given)
            loss.backward()
        return meter.peak, [loss.detach(), *(p.grad for p in self.model.parameters())]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("new_gradients", "allowance"), [(False, 0.7), (True, 0.5), (False, "bytes")], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_of_the_step_is_kept_with_changing_lengths(name, new_gradients, allowance):
    training = Training(name, new_gradients)
    plain = {length: peak for length, (peak, _) in training.plain.items()}
    with attach(training.model, hooks=[Checkpoint()]):
        least = {length: training.step(length)[0] for length in plain}
    half = plain[96] // 2
    if allowance == "bytes":
        checkpoint, allowed = Checkpoint(memory_budget=f"{half} B"), dict.fromkeys(plain, half)
    else:
        checkpoint = Checkpoint(memory_budget=allowance)
        allowed = {length: allowance * peak for length, peak in plain.items()}

    seen = {}
    with attach(training.model, hooks=[checkpoint]):
        for length in LENGTHS:
            peak, results = training.step(length)
            assert same(results, training.plain[length][1])
            assert peak <= (allowed[length] if length in seen else 1.1 * least[length])
            seen[length] = peak
    plans = checkpoint.planner.plans
    for length, found in zip(seen, plans, strict=True):
        assert found.plain_peak == pytest.approx(plain[length], rel=0.01)
        assert found.peak == pytest.approx(seen[length], rel=0.01)


@pytest.mark.parametrize("name", [name for name in MODELS if "outside" not in name])
def test_what_measure_says_of_a_model_is_what_a_step_takes(name):
    training = Training(name, new_gradients=False, lengths=(48,))
    torch.manual_seed(48)
    given = training.inputs(48)

    profile = budget.measure(training.model, **given)
    with attach(training.model, hooks=[Checkpoint()]):
        _, (peak, results) = training.step(48), training.step(48)

    assert same(results, training.plain[48][1])
    assert profile.plain.peak == pytest.approx(training.plain[48][0], rel=0.01)
    recomputed = plan.every(1)(len(profile))
    assert budget.predict(profile, recomputed).peak == pytest.approx(peak, rel=0.01)
