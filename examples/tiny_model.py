"""A language model small enough for a laptop's CPU: random weights and a tokenizer, made offline.

    python -m examples.tiny_model OUT [qwen3 | gemma3 | deepseek_v2 | qwen3_moe | phi3 | eagle]

Its answers have no meaning, but each token depends on all tokens before it: a wrong KV cache gives
other tokens. `gemma3` has sliding windows (two KV cache groups), `deepseek_v2` has MLA, `qwen3_moe`
has experts, `phi3` has long and short rope factors, chosen by the longest context that is served.
`eagle` is no model of its own: it drafts tokens from the hidden states of a `qwen3` of equal size.
"""

from __future__ import annotations

import random
import string
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 1024
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(
    target: Path, kind: str = "qwen3", *, seed: int = 0, layers: int = 4, hidden: int = 128
) -> Path:
    """Write the model to a directory, unless it exists; returns the directory."""
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    _tokenizer(target)
    torch.manual_seed(seed)
    heads = max(4, hidden // 32)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 32_768,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    model: Any
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=32, **common))
    elif kind == "gemma3":
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(
                head_dim=32,
                sliding_window=128,
                query_pre_attn_scalar=32,
                layer_types=kinds,
                **common,
            )
        )
    elif kind == "deepseek_v2":
        model = DeepseekV2ForCausalLM(
            DeepseekV2Config(
                q_lora_rank=None,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=64,
                v_head_dim=64,
                n_routed_experts=4,
                n_shared_experts=1,
                num_experts_per_tok=2,
                first_k_dense_replace=layers,
                moe_intermediate_size=64,
                # vLLM ties no embeddings here, so the output layer needs weights of its own.
                **{**common, "num_key_value_heads": heads, "tie_word_embeddings": False},
            )
        )
    elif kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=32, **experts, **common))
    elif kind == "phi3":
        model = Phi3ForCausalLM(Phi3Config(**_long_rope(hidden // heads // 2), **common))
    elif kind == "eagle":
        _eagle(target, LlamaConfig(**{**common, "num_hidden_layers": 1}))
        return target
    else:
        raise SystemExit(f"{kind}: expected qwen3, gemma3, deepseek_v2, qwen3_moe, phi3 or eagle")
    model.to(torch.bfloat16).save_pretrained(target, safe_serialization=True)
    return target


def _eagle(target: Path, config: LlamaConfig) -> None:
    """A layer of Llama behind a projection of a token's embedding and the hidden state before it;
    the embeddings and the output layer are those of the model that it drafts for."""
    layer = LlamaForCausalLM(config)
    weights = {
        name.removeprefix("model."): tensor.to(torch.bfloat16).contiguous()
        for name, tensor in layer.state_dict().items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    hidden = config.hidden_size
    weights["fc.weight"] = (torch.randn(hidden, 2 * hidden) * 0.2).to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(target)


def _long_rope(factors: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": 2048,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + 0.05 * i for i in range(factors)],
            "long_factor": [4.0 + 0.5 * i for i in range(factors)],
        },
    }


def _tokenizer(target: Path) -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(800)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        (" ".join(rng.choices(words, k=60)) for _ in range(400)),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - 8,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(target)


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), *sys.argv[2:3]))
