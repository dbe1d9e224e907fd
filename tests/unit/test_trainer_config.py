"""Flags, files and their errors: one sentence that names what is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from trainer import __main__ as program
from trainer import config, device, roles
from trainer.config import Settings, parse
from trainer.errors import InputError

GIVEN = ["--target-model", "toy"]


def test_every_field_is_a_flag_with_help() -> None:
    options = {option for action in config.parser()._actions for option in action.option_strings}
    for field in dataclasses.fields(Settings):
        assert "--" + field.name.replace("_", "-") in options
        assert field.metadata["help"]
    assert "None" not in config.parser().format_help()


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: demo\ntrainer:\n  target-model: toy\n  max_steps: 7\n  lr: 3e-4\n  grad-accum: 2\n"
        "  target-layer-ids: [1, 2]\n  cache-features: true\n  gamma:\n"
    )
    settings = parse(["--config", str(file), "--max-steps", "9", "--no-cache-features"]).settings
    assert settings.max_steps == 9
    assert settings.lr == 3e-4  # YAML reads 3e-4 as text
    assert settings.grad_accum == 2
    assert settings.target_layer_ids == (1, 2)
    assert settings.cache_features is False
    assert settings.gamma is None
    assert settings.epochs == Settings().epochs


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-step", "5"], "unrecognized argument --max-step; did you mean '--max-steps'?"),
        (["--use-soft-label"], "unrecognized argument --use-soft-label; did you mean '--use-soft-labels'?"),
        (["stray"], "unrecognized argument stray"),
        (["--lr", "0"], "--lr '0' must be a number above 0"),
        (["--lr", "fast"], "--lr 'fast' must be a number above 0"),
        (["--lr", "nan"], "--lr 'nan' must be a number above 0"),
        (["--lr", "inf"], "--lr 'inf' must be a number above 0"),
        (["--epochs", "1.5"], "--epochs '1.5' must be a whole number from 1 to 2147483647"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--warmup-ratio", "1"], "--warmup-ratio '1' must be a number from 0 to below 1"),
        (["--block-size", "1"], "--block-size '1' must be a whole number from 2 to 256"),
        (["--threads", "0"], "--threads '0' must be a whole number from 1 to 1024"),
        (["--seed", str(2**64)], f"--seed '{2**64}' must be a whole number from 0 to {2**63 - 1}"),
        (["--resume", "yes"], "--resume 'yes' must be auto or never"),
        (["--drafter-dtype", "fp16"], "--drafter-dtype 'fp16' must be auto or float32 or bfloat16"),
        (["--dtype", "float16"], "--dtype 'float16' must be float32 or bfloat16"),
        (["--device", "gpu"], "--device 'gpu' must be auto, cpu, cuda or cuda:N"),
        (["--target-layer-ids", "1,x"], "--target-layer-ids '1,x' must be whole numbers separated by commas"),
        (
            ["--target-layer-ids", "1,2", "--num-taps", "2"],
            "--target-layer-ids and --num-taps exclude each other",
        ),
        (["--eval-interval", "100"], "--eval-interval evaluates nothing by itself: say on how many prompts"),
        (["--eval-file", "p.txt"], "--eval-file evaluates nothing by itself: say on how many prompts"),
        (
            ["--max-seq-len", "4096", "--token-budget", "1024"],
            "--max-seq-len 4096 does not fit into --token-budget 1024",
        ),
        (["--block-size", "64", "--max-seq-len", "64"], "--block-size 64 leaves no room"),
        (["--use-soft-labels", "--kl-weight", "1.1"], "--kl-weight '1.1' must be a number from 0 to 1"),
        (["--use-soft-labels", "--kl-weight", "nan"], "--kl-weight 'nan' must be a number from 0 to 1"),
        (
            ["--use-soft-labels", "--kl-temperature", "0"],
            "--kl-temperature '0' must be a number above 0",
        ),
        (["--kl-weight", "0.15"], "--kl-weight means nothing without --use-soft-labels: add that"),
        (["--kl-temperature", "2"], "--kl-temperature means nothing without --use-soft-labels: add that"),
        (["--cap-lambda", "-0.1"], "--cap-lambda '-0.1' must be a number of at least 0"),
        (["--loss-type", "pace"], "--loss-type 'pace' must be decay or dpace"),
        (["--dpace-alpha", "0.5"], "--dpace-alpha means nothing without --loss-type dpace: add that"),
        (["--loss-type", "dpace", "--dpace-alpha", "2"], "--dpace-alpha '2' must be a number from 0 to 1"),
        (["--loss-type", "dpace", "--gamma", "7"], "--gamma and --loss-type dpace exclude each other"),
        (["--loss-chunk-mb", "0"], "--loss-chunk-mb '0' must be a whole number from 1"),
        (["--sample-blocks", "-1"], "--sample-blocks '-1' must be a whole number from 0"),
        (["--target-gpus", "0"], "--target-gpus needs --drafter-gpus beside it"),
        (["--drafter-gpus", "0"], "--drafter-gpus needs --target-gpus beside it"),
        (["--target-gpus", "0,0", "--drafter-gpus", "1"], "--target-gpus 0,0 names GPU 0 twice"),
        (
            ["--target-gpus", "0,1", "--drafter-gpus", "1,2"],
            "--target-gpus 0,1 and --drafter-gpus 1,2 share GPU 1: give each GPU one role",
        ),
        (
            ["--target-gpus", "0", "--drafter-gpus", "0", "--device", "cuda"],
            "--device cuda and --target-gpus exclude each other",
        ),
        (["--target-gpus", "a", "--drafter-gpus", "0"], "--target-gpus 'a' must be numbers of GPUs"),
        (["--target-gpus", "0", "--drafter-gpus", "cpu:1"], "mix processes on the CPU with GPUs"),
        (["--target-gpus", "0", "--drafter-gpus", "1+2"], "only a target is spread over several; give 1,2"),
        (["--target-gpus", "0+1,1", "--drafter-gpus", "2"], "--target-gpus 0+1,1 names GPU 1 twice"),
        (["--noise-type", "salt"], "--noise-type 'salt' must be uniform or gaussian"),
        (["--compile", "maybe"], "--compile 'maybe' must be auto or on or off"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_flag_is_one_sentence(flags: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse([*GIVEN, *flags])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer: {max_step: 5}", "unknown key trainer.max_step; did you mean 'max_steps'?"),
        ("trainer: {blok-size: 5}", "unknown key trainer.blok-size; did you mean 'block-size'?"),
        ("trainer: {max_steps: lots}", "trainer.max_steps 'lots' must be a whole number"),
        ("trainer: {max_steps: 2.5}", "trainer.max_steps is 2.5 and must be a whole number"),
        ("trainer: {max_steps: true}", "trainer.max_steps is True and must be a whole number"),
        ("trainer: {cache_features: 1}", "trainer.cache_features is 1 and must be true or false"),
        ("trainer: {seed: [1]}", "trainer.seed is [1] and must be a whole number"),
        ("trainer: [1]", "has no `trainer:` mapping"),
        ("name: demo", "has no `trainer:` mapping"),
        ("", "has no `trainer:` mapping"),
        ("trainer: {a: 1", "is not valid YAML"),
        ("trainer: \x00", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        parse([*GIVEN, "--config", str(tmp_path / "run.yaml")])
    assert says in str(caught.value)
    assert "run.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [([], "--target-model is missing"), (["--target-model", "/some/model"], "--data-dir is missing")],
)
def test_what_must_be_given_is_asked_for(flags: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        parse(flags)


@pytest.mark.parametrize(
    ("block", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0), (32, 10.0), (2, 1.0), (24, 8.5), (64, 10.0)]
)
def test_the_decay_follows_the_block_size_unless_given(block: int, gamma: float) -> None:
    assert Settings(block_size=block).decay == gamma
    assert Settings(block_size=block, gamma=3.0).decay == 3.0


def test_the_extras_are_off_unless_asked_for_and_have_names_that_are_published() -> None:
    plain = Settings()
    assert (plain.soft_labels[0], plain.cap_lambda, plain.dpace) == (0.0, 0.0, None)
    given = ["--use-soft-labels", "--kl-weight", "0.3", "--kl-temperature", "3", "--cap-lambda", "0.1"]
    settings = parse([*GIVEN, *given, "--loss-type", "dpace"]).settings
    assert (settings.soft_labels, settings.cap_lambda, settings.dpace) == ((0.3, 3.0), 0.1, 0.5)
    assert parse([*GIVEN, "--use-soft-labels"]).settings.soft_labels == (0.15, 2.0)


def test_what_is_learnt_holds_the_values_that_the_defaults_stand_for() -> None:
    learning = Settings(use_soft_labels=True, loss_type="dpace").learning()
    assert (learning["kl_weight"], learning["kl_temperature"], learning["dpace_alpha"]) == (0.15, 2.0, 0.5)
    assert Settings().learning()["kl_weight"] is None  # a checkpoint that is older than the flag has none


def test_the_drafter_trains_in_bfloat16_on_a_gpu_and_in_float32_on_a_cpu_unless_told_otherwise() -> None:
    kinds = [parse([*GIVEN, *given]).settings for given in ([], ["--drafter-dtype", "bfloat16"])]
    kinds.append(parse([*GIVEN, "--drafter-dtype", "float32"]).settings)
    assert [one.drafter_type(on_gpu=True) for one in kinds] == ["bfloat16", "bfloat16", "float32"]
    assert [one.drafter_type(on_gpu=False) for one in kinds] == ["float32", "bfloat16", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    home = tmp_path_factory.mktemp("model")
    target = tiny.target_directory(home / "target")
    return target, tiny.data_directory(home / "data", target)


def spoiled(model: tuple[Path, Path], home: Path, how: str) -> tuple[Path, Path]:
    """A copy of target and data with one thing wrong."""
    import shutil

    target, data = home / "target", home / "data"
    shutil.copytree(model[0], target)
    shutil.copytree(model[1], data)
    weights = target / "model.safetensors"
    if how == "no target":
        shutil.rmtree(target)
    elif how == "no config":
        (target / "config.json").unlink()
    elif how == "config of something else":
        (target / "config.json").write_text("[]")
    elif how == "no decoder":
        (target / "config.json").write_text('{"model_type": "vit"}')
    elif how == "no weights":
        weights.unlink()
    elif how == "weights cut off":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "weights cut in the header":
        weights.write_bytes(weights.read_bytes()[:100])
    elif how == "weights of something else":
        weights.write_bytes(b"not a safetensors file, but text that is long enough")
    elif how == "empty weights":
        weights.write_bytes(b"")
    elif how == "a shard missing":
        index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "another tokenizer":
        text = (target / "tokenizer.json").read_text()
        (target / "tokenizer.json").write_text(text.replace('"t0"', '"T0"'))
    elif how == "no tokenizer":
        (target / "tokenizer.json").unlink()
    elif how == "no data":
        shutil.rmtree(data)
    return target, data


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no target", "there is no such directory"),
        ("no config", "no config.json"),
        ("config of something else", "names no model_type"),
        ("no decoder", "'num_hidden_layers'"),
        ("no weights", "no .safetensors"),
        ("weights cut off", "model.safetensors has"),
        ("weights cut in the header", "model.safetensors is cut off"),
        ("weights of something else", "model.safetensors"),
        ("empty weights", "too few"),
        ("a shard missing", "other.safetensors is missing"),
        ("another tokenizer", "another tokenizer"),
        ("no tokenizer", "it has no tokenizer"),
        ("no data", "no data.json"),
    ],
)
def test_wrong_input_ends_with_one_sentence_and_code_2_and_changes_nothing(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, says: str
) -> None:
    target, data = spoiled(model, tmp_path, how)
    before = sorted(tmp_path.rglob("*"))
    assert program.main(tiny.flags(target, data, tmp_path / "out")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err
    assert str(target) in err or str(data) in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_taps": 9}, "--num-taps 9"),
        ({"num_taps": None, "target_layer_ids": "1,3"}, "--target-layer-ids 1,3"),
        ({"mask_token_id": 97}, "--mask-token-id 97"),
        ({"block_size": 61, "max_seq_len": 256}, "--block-size 61 is more than the "),
    ],
)
def test_flags_that_do_not_fit_the_target_are_told_before_torch_is_imported(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, says: str
) -> None:
    assert program.main(tiny.flags(*model, tmp_path / "out", **changes)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target-layer-ids", "9"], "--target-layer-ids 9 does not fit a target of 4 layers"),
        (["--num-taps", "4"], "--num-taps 4 is out of range: this target has 4 layers"),
        (["--mask-token-id", "1024"], "--mask-token-id 1024 is not in the target's vocabulary of 1024"),
        (["--data-dir", "/nowhere"], "--data-dir /nowhere: it has no data.json"),
        (["--device", "cuda"], "--device cuda: "),
        (["--wandb-project", "x"], "--wandb-project needs the package wandb"),
    ],
)
def test_the_toys_settings_are_checked_before_it_is_made(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    says: str,
) -> None:
    monkeypatch.delenv("DRAFTHOUSE_TOY", raising=False)
    monkeypatch.setattr(device, "_built_without_gpu", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name))
    given = [*GIVEN, "--output-dir", str(tmp_path / "out"), "--check-config"]
    assert program.main(given) == 0
    assert program.main([*given, *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "nodes", "visible", "says"),
    [
        ("cuda", [], None, "there is no GPU here"),
        ("cuda:2", ["nvidia0", "nvidia1", "nvidiactl"], None, "a run sees 2 GPUs here; give one"),
        ("cuda:1", ["nvidia0", "nvidia1"], "1", "sees 1 GPUs here (CUDA_VISIBLE_DEVICES is '1')"),
        ("cuda", ["nvidia0"], "", "sees 0 GPUs"),
        ("cuda", ["kfd"], "-1", "sees 0 GPUs"),
        ("cuda", ["nvidia0"], None, None),
        ("cuda:1", ["nvidia0", "nvidia1"], "0,1", None),
        ("cuda:3", ["kfd"], None, None),
        ("cuda:1", ["dxg"], "0,1", None),
        ("cpu", [], "", None),
        ("auto", [], "", None),
    ],
)
def test_a_device_that_is_not_there_is_told_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nodes: list[str],
    visible: str | None,
    says: str | None,
) -> None:
    monkeypatch.setattr(device, "_built_without_gpu", lambda: False)
    for node in nodes:
        (tmp_path / node).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    if says is None:
        device.check(name, devices=tmp_path, environment=environment)
        return
    with pytest.raises(InputError, match=re.escape(says)):
        device.check(name, devices=tmp_path, environment=environment)


@pytest.mark.parametrize(
    ("name", "nodes", "visible", "gpu"),
    [
        ("auto", [], None, False),
        ("auto", ["nvidia0"], None, True),
        ("auto", ["nvidia0"], "", False),
        ("auto", ["kfd"], None, True),
        ("cpu", ["nvidia0"], None, False),
        ("cuda:3", [], None, True),
    ],
)
def test_where_a_run_will_compute_is_told_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    nodes: list[str],
    visible: str | None,
    gpu: bool,
) -> None:
    monkeypatch.setattr(device, "_built_without_gpu", lambda: False)
    for node in nodes:
        (tmp_path / node).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device.on_gpu(name, devices=tmp_path, environment=environment) is gpu
    monkeypatch.setattr(device, "_built_without_gpu", lambda: True)
    assert device.on_gpu(name, devices=tmp_path, environment=environment) is (name == "cuda:3")


@pytest.mark.parametrize(
    ("numbers", "nodes", "visible", "starting", "says"),
    [
        ("0,1,2", [0, 1], None, True, "there is no GPU 2 here, since a run sees 2 GPUs; GPUs are counted"),
        ("0,1,2", [0, 1], None, False, "there is no GPU 2 here"),
        ("1", [0, 1], "1", False, "since a run sees 1 GPUs (CUDA_VISIBLE_DEVICES is '1')"),
        ("0", [], None, True, "since a run sees 0 GPUs"),
        ("0,1,2,3,4", [], None, False, None),  # a configuration for another machine
        ("0,1", [0, 1], None, True, None),
        ("0", [], "-1", False, None),
    ],
)
def test_more_gpus_named_than_there_are_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    numbers: str,
    nodes: list[int],
    visible: str | None,
    starting: bool,
    says: str | None,
) -> None:
    monkeypatch.setattr(device, "_built_without_gpu", lambda: False)
    for node in nodes:
        (tmp_path / f"nvidia{node}").touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    given = tuple(numbers.split(","))
    options: dict = {"starting": starting, "devices": tmp_path, "environment": environment}
    if says is None:
        device.check_gpus("--target-gpus", given, **options)
        return
    with pytest.raises(InputError, match=re.escape(f"--target-gpus {numbers}: ")) as caught:
        device.check_gpus("--target-gpus", given, **options)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "without"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", True),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", False),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'\n", False),
        ("cuda = None\n", True),
        ("", False),
    ],
)
def test_a_torch_for_the_cpu_alone_is_known_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, without: bool
) -> None:
    (tmp_path / "version.py").write_text(lines)
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: spec)
    assert device._built_without_gpu() is without


def test_check_config_needs_no_weights(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data = spoiled(model, tmp_path, "no weights")
    assert program.main([*tiny.flags(target, data, tmp_path / "out"), "--check-config"]) == 0
    assert "4 layers, width 32" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_what_is_doubtful_is_said_at_the_start_in_a_line_each(
    model: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data = spoiled(model, tmp_path, "nothing")
    (target / "chat_template.jinja").write_text("another")
    meta = json.loads((data / "data.json").read_text())
    (data / "data.json").write_text(json.dumps({**meta, "template": "0" * 16}))
    assert program.main([*tiny.flags(target, data, tmp_path / "out", mask_token_id=5), "--check-config"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert f"data {data}: it was prepared with another chat template" in warnings[0]
    assert "--mask-token-id 5 is the token 't5'" in warnings[1]


def test_print_config_prints_what_was_resolved(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*GIVEN, "--max-steps", "5", "--print-config"]) == 0
    assert json.loads(capsys.readouterr().out)["max_steps"] == 5


def test_a_run_directory_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([*GIVEN, "--run-dir", "/nowhere/at/all"]) == 2
    assert "--run-dir /nowhere/at/all" in capsys.readouterr().err


def test_checking_a_command_line_imports_no_torch(model: tuple[Path, Path], tmp_path: Path) -> None:
    script = (
        "import sys; from trainer.__main__ import main; code = main(sys.argv[1:]);"
        "print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", script, *tiny.flags(*model, tmp_path / "out"), "--check-config"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"


def test_each_device_is_a_rank_with_its_role_and_drafters_come_first() -> None:
    def ranks(*flags: str) -> list[str]:
        return [str(rank) for rank in roles.of(parse([*GIVEN, *flags]).settings).ranks]

    assert ranks("--target-gpus", "0,1+3", "--drafter-gpus", "2") == [
        "rank 0 (drafter 0 on cuda:2)",
        "rank 1 (target 0 on cuda:0)",
        "rank 2 (target 1 on cuda:1+cuda:3)",
    ]
    assert ranks("--target-gpus", "cpu:0,cpu:1", "--drafter-gpus", "cpu:0,cpu:1") == [
        "rank 0 (colocated on cpu:0)",
        "rank 1 (colocated on cpu:1)",
    ]
    assert len(ranks("--target-gpus", "1,0", "--drafter-gpus", "0,1")) == 2
    assert ranks("--target-gpus", "3", "--drafter-gpus", "3") == ["rank 0 (colocated on cuda:3)"]
    assert ranks() == ["rank 0 (colocated on auto)"]


# The command line that the reference recipe was written from, as it was typed.
CASE = """--target-model /dev/shm/Qwen3.6-27B --data-dir /workspace/tokenized_completions
--output-dir /workspace/checkpoints --target-gpus 0,1,2,3,4 --drafter-gpus 5,6,7
--epochs 6 --lr 6e-4 --warmup-ratio 0.04 --weight-decay 0.01 --grad-accum 4 --grad-clip 1.0
--token-budget 49152 --max-seq-len 8192 --max-batch-size 64
--block-size 32 --max-anchors 1024 --num-draft-layers 5 --gamma 10.0
--noise-start 0.05 --noise-end 0.01 --noise-type uniform
--use-soft-labels --kl-weight 0.15 --kl-temperature 2.0 --cap-lambda 0.1
--save-interval 2000 --wandb-project dflash-qwen36-27b --wandb-run-name exp-ddtree-tl-fix"""


def test_the_command_line_of_a_trainer_written_by_hand_is_read_as_it_was_meant() -> None:
    found = dataclasses.asdict(parse(CASE.split()).settings)
    meant = {
        "target_model": "/dev/shm/Qwen3.6-27B",
        "data_dir": "/workspace/tokenized_completions",
        "output_dir": "/workspace/checkpoints",
        "target_gpus": ("0", "1", "2", "3", "4"),
        "drafter_gpus": ("5", "6", "7"),
        "epochs": 6,
        "lr": 6e-4,
        "warmup_ratio": 0.04,
        "weight_decay": 0.01,
        "grad_accum": 4,
        "grad_clip": 1.0,
        "token_budget": 49152,
        "max_seq_len": 8192,
        "max_batch_size": 64,
        "block_size": 32,
        "max_anchors": 1024,
        "num_draft_layers": 5,
        "gamma": 10.0,
        "noise_start": 0.05,
        "noise_end": 0.01,
        "noise_type": "uniform",
        "use_soft_labels": True,
        "kl_weight": 0.15,
        "kl_temperature": 2.0,
        "cap_lambda": 0.1,
        "save_interval": 2000,
        "wandb_project": "dflash-qwen36-27b",
        "wandb_run_name": "exp-ddtree-tl-fix",
    }
    assert len(meant) == CASE.count("--")
    assert {name: found[name] for name in meant} == meant


def test_the_reference_recipe_is_that_command_line() -> None:
    recipe = Path(__file__).parents[2] / "runs" / "qwen3.6-27b-8gpu.yaml"
    by_file = dataclasses.asdict(parse(["--config", str(recipe)]).settings)
    by_hand = dataclasses.asdict(parse(CASE.split()).settings)
    places = ("target_model", "data_dir", "output_dir", "wandb_run_name")  # the deploy's
    differing = {name for name in by_file if by_file[name] != by_hand[name]} - set(places)
    assert differing == {"dtype", "drafter_dtype", "recompute"}
    assert by_file["dtype"] == by_file["drafter_dtype"] == "bfloat16"


def test_a_command_whose_reader_has_left_ends_without_a_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    program = (
        "import sys; from trainer import errors; sys.exit(errors.to_the_end(lambda: print('x' * 10_000)))"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program], stdout=writing, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")
