"""Every model type that transformers lists, attached to `Checkpoint` and compared with itself.

    python tests/bench/zoo.py                   # all of them, some 20 minutes
    python tests/bench/zoo.py --only llama,t5

Each type is built from a small random configuration, in a process of its own, and `verify` compares a plain step and a
hooked one bit for bit. Types that need more than sizes to be built, or other inputs than token ids or pixels, are
counted with the reason why they did not run.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from blockhooks import AttachError, Checkpoint, verify

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "num_hidden_layers": 3,
    "n_layer": 3, "n_layers": 3, "num_layers": 3, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_kv": 8, "head_dim": 8, "image_size": 32, "patch_size": 8,
    "max_position_embeddings": 64, "n_positions": 64,
}  # fmt: skip


def build(kind: str) -> torch.nn.Module:
    """Build a model of a type with whatever sizes its configuration knows, else with its own."""
    blank = transformers.AutoConfig.for_model(kind)
    known = {
        name: size for name, size in SIZES.items() if isinstance(getattr(blank, name, None), int)
    }
    config = transformers.AutoConfig.for_model(kind, **known)
    for special in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, special, None), int):
            setattr(config, special, 1)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).train()


def inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Token ids, or pixels, as the model's main input is called."""
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(2, 60, (2, 8))
    given = {model.main_input_name: ids}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return given


def trial(kind: str, told: multiprocessing.SimpleQueue) -> None:
    """Tell what became of one type."""
    torch.set_num_threads(1)
    try:
        model = build(kind)
        given = inputs(model)
    except Exception as error:
        return told.put(f"not built: {type(error).__name__}")
    try:
        model(**given)
    except Exception as error:
        return told.put(f"not run: {type(error).__name__}")
    try:
        found = verify(model, given, Checkpoint())
    except AttachError:
        return told.put("no blocks")
    except Exception as error:
        return told.put(f"ERROR: {type(error).__name__}: {error}")
    if not found.deterministic:
        return told.put("not deterministic")
    if not found.exact:
        return told.put(f"DIFFERS: {found.first}")
    return told.put("exact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="types, separated by commas")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for a type")
    options = parser.parse_args()
    kinds = options.only.split(",") if options.only else sorted(CONFIG_MAPPING_NAMES)
    forked = multiprocessing.get_context("fork")
    totals: collections.Counter[str] = collections.Counter()
    for kind in kinds:
        told = forked.SimpleQueue()
        process = forked.Process(target=trial, args=(kind, told), daemon=True)
        process.start()
        process.join(options.timeout)
        if process.is_alive():
            process.kill()
            process.join()
        outcome = "not run: no answer in time" if told.empty() else told.get()
        totals[outcome.split(":")[0]] += 1
        print(f"{kind:32} {outcome}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in totals.most_common()))


if __name__ == "__main__":
    main()
