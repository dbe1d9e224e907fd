"""What looks like a secret is not shown; what does not, is."""

from __future__ import annotations

import pytest

from deploy import mask

SECRET = [
    "HF_TOKEN",
    "API_KEY",
    "wandb_api_key",
    "DB_PASSWORD",
    "environment.GITHUB_TOKEN",
    "trainer.api-key",
    "AUTH",
]
OPEN = [
    "secrets",
    "LEVEL",
    "MONKEY",
    "token-budget",
    "mask-token-id",
    "KEYBOARD",
    "TOKENIZERS_PARALLELISM",
    "num-tokens",
]


@pytest.mark.parametrize(("name", "secret"), [*((n, True) for n in SECRET), *((n, False) for n in OPEN)])
def test_names_of_secrets_are_told_from_others(name: str, secret: bool) -> None:
    assert mask.secret_name(name) == secret


def test_the_password_of_an_address_is_masked_and_the_address_stays() -> None:
    assert mask.text("see https://ada:s3cret@host/x and http://host:80/@y") == (
        "see https://ada:***@host/x and http://host:80/@y"
    )


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN={}",
        'HF_TOKEN="{}"',
        'HF_TOKEN="a\\\\\\"{}\\"{}"',
        "x --api-key 'a'\"'\"'{}'",
        "  HF_TOKEN: {}",
        '      HF_TOKEN: "{}"',
        ' "--api-key",\n "{}",',
        "  - --api-key\n  - {}",
        ' "--api-key={}",',
        "export API_KEY={}",
        "#   python -m x --lr 1 --api-key {} --seed 2",
        "#   sh -c 'API_KEY={} python x'",
    ],
)
def test_in_every_kind_of_file_that_is_rendered_the_value_is_gone_and_the_change_shows(line: str) -> None:
    old, new = (f"a: 1\n{line.replace('{}', word)}\nz: 2\n" for word in ("hunter2", "swordfish"))
    one, other = mask.both(old.encode(), new.encode())
    assert one is not None
    assert other is not None
    assert "hunter2" not in one
    assert "swordfish" not in other
    assert one != other
    assert mask.both(old.encode(), old.encode())[0] == mask.both(old.encode(), old.encode())[1]
    assert (one.splitlines()[0], one.splitlines()[-1]) == ("a: 1", "z: 2")


def test_a_file_that_is_on_one_side_only_is_masked_too() -> None:
    assert mask.both(None, b"API_KEY=x\n") == (None, "API_KEY=***\n")
    assert mask.both(b"API_KEY=x\n", None) == ("API_KEY=***\n", None)


def test_an_answer_in_json_is_masked_at_every_depth_and_keeps_its_shape() -> None:
    run = {
        "command": ("p", "--api-key", "s3cret", "--lr", "1", "sh -c 'TOKEN=s3cret x'"),
        "environment": {"HF_TOKEN": "s3cret", "LEVEL": "2"},
        "secrets": ["HF_TOKEN"],
        "running": [{"argv": ["--password=s3cret", "two\nTOKEN=s3cret"]}],
        "exit": None,
        "alive": True,
        "tokens_per_second": {"now": 1.5},
    }
    assert mask.tree(run) == {
        "command": ["p", "--api-key", "***", "--lr", "1", "sh -c 'TOKEN=*** x'"],
        "environment": {"HF_TOKEN": "***", "LEVEL": "2"},
        "secrets": ["HF_TOKEN"],
        "running": [{"argv": ["--password=***", "two\nTOKEN=***"]}],
        "exit": None,
        "alive": True,
        "tokens_per_second": {"now": 1.5},
    }
