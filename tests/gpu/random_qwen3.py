"""A random Qwen3 of about 8B parameters with another model's tokenizer: python random_qwen3.py TOKENIZER_DIR OUT_DIR"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 36, 4096, 12288, 32, 8, 128


def main(source: Path, out: Path) -> None:
    began = time.monotonic()
    tokenizer, like = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    config = Qwen3Config(
        vocab_size=like.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=like.eos_token_id,
        bos_token_id=None,
        pad_token_id=like.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(out, max_shard_size="4GB")
    tokenizer.save_pretrained(out)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e9:.2f}B parameters in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
