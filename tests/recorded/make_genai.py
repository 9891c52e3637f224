"""Record the folder of a small Llama by the builder of onnxruntime-genai.

`python make_genai.py` needs torch, transformers, tokenizers and onnxruntime-genai; tests need none of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

FOLDER = Path(__file__).parent / "genai"
WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 32)}}

if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, **tokens, initializer_range=0.3)
    with tempfile.TemporaryDirectory() as folder:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        shutil.rmtree(FOLDER, ignore_errors=True)
        options = ["-m", folder, "-i", folder, "-o", str(FOLDER), "-p", "fp32", "-e", "cpu", "-c", f"{folder}/cache"]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *options], check=True)
