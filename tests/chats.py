"""Tiny chat models for tests: a byte-level tokenizer, made on the spot, with a chat template."""

from __future__ import annotations

from pathlib import Path

import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 260  # 256 bytes, <|im_start|>, <|im_end|> and room for a mask token
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: reasoning is shown in the last answer only, and `enable_thinking` may rule it out.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}<think>\n{{ parts[0].replace('<think>', '').strip() if parts|length > 1 else '' }}\n"
    "</think>\n\n{% endif %}{{ parts[-1].strip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# As Gemma's: no system prompt, and user and assistant must take turns. Tools come first.
STRICT = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if loop.first and m.role != 'user' %}{{ raise_exception('A user must begin') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_model(path: Path, template: str | None = CHATML, **changes: object) -> Path:
    """A model directory: random weights, the tokenizer and `template`."""
    tiny.target_directory(path, tiny.qwen3(vocab_size=VOCABULARY, max_position_embeddings=1024, **changes))
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", chat_template=template)
    tokenizer.save_pretrained(path)
    return path
