"""Adapters (LoRA) on the real engine: nothing of them is kept, nothing kept is theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import HERE, LARGE_POOL, ROUND, Answer, Engine, engine, sampling
from safetensors.torch import save_file
from test_life import at_rest, forget_pool, near
from vllm.lora.request import LoRARequest

TINY = "tinyllama"
RANK = 8
PROMPT = ROUND[0][:200]
SETTINGS: dict[str, Any] = {
    "blocks": LARGE_POOL,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
    # On a CPU the engine gathers an adapter's weights anew for every token.
    "max_model_len": 256,
    "max_num_batched_tokens": 256,
}


def adapter(folder: Path, name: str, number: int, seed: int) -> LoRARequest:
    """An adapter of keys and values with random weights, large enough to show."""
    config = json.loads((HERE / "models" / TINY / "config.json").read_text())
    width = config["hidden_size"]
    heads = config["num_key_value_heads"] * config["head_dim"]
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{at}.lora_A.weight"] = torch.randn(RANK, width, generator=source) / 16
            weights[f"{at}.lora_B.weight"] = torch.randn(heads, RANK, generator=source)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    facts = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return LoRARequest(name, number, str(folder))


def ask(ours: Engine, lora: LoRARequest | None) -> Answer:
    [out] = ours.llm.generate(
        {"prompt_token_ids": PROMPT}, sampling(8), use_tqdm=False, lora_request=lora
    )
    [completion] = out.outputs
    tokens = tuple(completion.token_ids)
    probs = tuple(p[t].logprob for p, t in zip(completion.logprobs, tokens, strict=True))
    return Answer(tokens, probs, out.num_cached_tokens)


@pytest.fixture
def adapters(tmp_path: Path) -> list[LoRARequest]:
    """Two adapters, and the first one's name with other weights."""
    return [
        adapter(tmp_path / f"{name}{number}", name, number, seed=number)
        for number, name in enumerate(("a", "b", "a"), start=1)
    ]


def test_case_022_adapters_answer_as_without_a_connector_and_leave_nothing_in_it(
    adapters: list[LoRARequest],
) -> None:
    asked = [None, *adapters]
    with engine(TINY, **SETTINGS) as plain:
        theirs = [ask(plain, lora) for lora in asked]
    with engine(TINY, extra={"url": "memory://"}, **SETTINGS) as ours:
        answers = [ask(ours, None)]
        forget_pool(ours)
        kept = ours.counters["saved_blocks"]
        assert kept == 6
        for lora in adapters:
            answers.append(ask(ours, lora))
            forget_pool(ours)
        again = ask(ours, adapters[0])
        forget_pool(ours)
        counters = ours.counters
        base = ask(ours, None)
        at_rest(ours)
    assert len({a.tokens for a in theirs}) == 4  # or the adapters would prove nothing
    assert near(answers, theirs)
    assert near([again], theirs[1:2])
    assert [a.cached_tokens for a in (*answers, again)] == [0] * 5
    assert counters["saved_blocks"] == kept
    assert counters["hits"] == 0
    assert base.cached_tokens == 192
    assert near([base], theirs[:1])
