"""Real architectures with tiny random weights: a training step with its cache is the plain one, bit for bit."""

import copy

import pytest
import torch

from blockhooks import Checkpoint, attach
from tests.models.toys import same, step, tensors

transformers = pytest.importorskip("transformers")

TEXT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = TEXT | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
EXPERTS = LLAMA | {"num_experts_per_tok": 2}
BERT = TEXT | {"intermediate_size": 48, "max_position_embeddings": 32}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 64,
    "max_position_embeddings": 32, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3,
}  # fmt: skip
T5 = {
    "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": 64, "decoder_start_token_id": 0,
}  # fmt: skip
VIT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
       "image_size": 16, "patch_size": 4}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 64}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "vocab_size": 64}

CAUSAL = {
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 4},
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 8},
    "Gemma2": LLAMA | {"head_dim": 8, "sliding_window": 4},
    "Mixtral": EXPERTS | {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "GPT2": GPT2,
    "GPTNeoX": LLAMA,
    "GPTJ": GPT2 | {"rotary_dim": 4},
    "Bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "hidden_dropout": 0.1},
    "OPT": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 64,
            "word_embed_proj_dim": 32, "max_position_embeddings": 32, "layerdrop": 0.3},
    "Falcon": TEXT,
    "Phi": LLAMA,
    "Mamba": MAMBA,
    "Mamba2": MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4, "expand": 2},
    "Jamba": EXPERTS | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2,
                        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
}  # fmt: skip
MASKED = {
    "Bert": BERT,
    "Albert": BERT | {"embedding_size": 16},
    "Funnel": {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [2, 2], "vocab_size": 64,
               "num_decoder_layers": 1},
    "SqueezeBert": BERT | {"embedding_size": 32},
}  # fmt: skip
SEQ2SEQ = {"T5": T5, "Bart": BART}
VISION = {
    "ViT": VIT,
    "Swin": {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 4},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 3]},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [2, 3], "patch_size": 2, "num_stages": 2, "drop_path_rate": 0.2},
    "MobileNetV2": {"image_size": 16, "depth_multiplier": 0.25},
}  # fmt: skip


def build(name, head, config):
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}{head}")(made).train()


def tokens(*shape):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(2))


def text_inputs():
    ids = tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def image_inputs(size):
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


CASES = {
    **{
        n: ("ForCausalLM", c, lambda: text_inputs() | {"use_cache": True})
        for n, c in CAUSAL.items()
    },
    **{n: ("ForMaskedLM", c, text_inputs) for n, c in MASKED.items()},
    **{
        n: (
            "ForConditionalGeneration",
            c,
            lambda: text_inputs() | {"labels": tokens(2, 6), "use_cache": True},
        )
        for n, c in SEQ2SEQ.items()
    },
    **{n: ("ForImageClassification", c, lambda: image_inputs(16)) for n, c in VISION.items()},
}
CASES["GPT2"] = ("LMHeadModel", *CASES["GPT2"][1:])


@pytest.mark.parametrize("name", CASES)
def test_a_training_step_is_the_plain_one(name):
    head, config, make_inputs = CASES[name]
    plain = build(name, head, config)
    hooked = copy.deepcopy(plain)
    with attach(hooked, [Checkpoint()]) as handle:
        for _ in range(2):
            one, other = step_of(plain, make_inputs()), step_of(hooked, make_inputs())
            assert same(one, other)
        report = handle.report()
    assert report.dropped_bytes > report.saved_bytes / 2
    assert all(
        block["done"] == "recomputed"
        for stack in report.stacks
        for block in stack["blocks"]
        if block["calls"]
    )
    assert same(step_of(plain, make_inputs()), step_of(hooked, make_inputs()))


def step_of(model, inputs):
    return step(model, loss=lambda output: output.loss, **inputs)


@pytest.mark.parametrize("name", [*CAUSAL, "T5"])
def test_the_cache_comes_back_full(name):
    """Not switched off, not written twice: see that the comparison above has something to compare."""
    head, config, make_inputs = CASES[name]
    model = build(name, head, config)
    with attach(model, [Checkpoint()]):
        output = model(**make_inputs())
    cache = output.cache_params if "Mamba" in name else output.past_key_values
    held = [tensor for _, tensor in tensors(cache)]
    assert len(held) >= 3
    output.loss.backward()
    assert same(held, [tensor for _, tensor in tensors(cache)])


def test_a_second_step_with_the_cache_of_the_first():
    plain = build("Llama", "ForCausalLM", LLAMA)
    hooked = copy.deepcopy(plain)
    results = []
    for model in (plain, hooked):
        context = attach(model, [Checkpoint()]) if model is hooked else torch.enable_grad()
        with context:
            torch.manual_seed(1)
            first = model(input_ids=tokens(2, 6), use_cache=True)
            second = model(input_ids=tokens(2, 2), cache=first.past_key_values, use_cache=True)
            (first.logits.sum() + second.logits.square().sum()).backward()
        caches = [t.detach() for _, t in tensors(second.past_key_values)]
        results.append([second.logits.detach(), caches, [p.grad for p in model.parameters()]])
    assert same(*results)


def test_generation_is_the_same():
    model = build("Llama", "ForCausalLM", LLAMA).eval()
    plain = model.generate(tokens(2, 4), max_new_tokens=5, do_sample=False, pad_token_id=0)
    with attach(model, [Checkpoint()]):
        assert torch.equal(
            plain, model.generate(tokens(2, 4), max_new_tokens=5, do_sample=False, pad_token_id=0)
        )


def test_collected_hidden_states_and_attentions_are_the_same():
    model = build("Llama", "ForCausalLM", LLAMA | {"attn_implementation": "eager"})
    inputs = {"input_ids": tokens(2, 6), "output_hidden_states": True, "output_attentions": True}
    plain = model(**inputs)
    with attach(model, [Checkpoint()]):
        hooked = model(**inputs)
    assert len(hooked.hidden_states) == 4
    assert len(hooked.attentions) == 3
    assert same(plain.hidden_states, hooked.hidden_states)
    assert same(plain.attentions, hooked.attentions)


def test_with_the_library_s_own_checkpointing_switched_on_as_well():
    plain = build("Llama", "ForCausalLM", LLAMA)
    hooked = copy.deepcopy(plain)
    hooked.activation_checkpointing_enable()
    with attach(hooked, [Checkpoint()]):
        assert same(
            step_of(plain, text_inputs() | {"use_cache": False})["gradients"],
            step_of(hooked, text_inputs() | {"use_cache": False})["gradients"],
        )
