"""deploy.image: what an image is named by, what has to be done for it, and what it is built from."""

from __future__ import annotations

import dataclasses
import io
import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy import image
from deploy.errors import DeployError

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    base: str | None = None
    torch_index_url: str | None = None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of all that could matter to the image."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in (*image.FILES, ".dockerignore", "README.md"):
        shutil.copy(CHECKOUT / name, root)
    for name in image.CODE:
        shutil.copytree(CHECKOUT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def described(root: Path, variant: str = "cpu", **settings: str) -> image.Image:
    return image.describe(root, Settings(**settings), variant)


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)


def test_the_same_checkout_has_the_same_digest_wherever_it_lies(checkout: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkout, elsewhere)
    assert described(elsewhere) == described(checkout)


@pytest.mark.parametrize(
    "changed",
    ["trainer/loss.py", "trainer/deep/new.py", "runs/demo.yaml", "runs/new.yaml", "trainer/notes.txt"],
)
def test_a_change_of_the_code_names_another_image_on_the_same_packages(checkout: Path, changed: str) -> None:
    before = described(checkout)
    append(checkout / changed, "\n# changed\n")
    after = described(checkout)
    assert after.reference != before.reference
    assert after.packages == before.packages


def test_a_file_that_is_gone_or_renamed_names_another_image(checkout: Path) -> None:
    whole = described(checkout)
    (checkout / "trainer" / "loss.py").rename(checkout / "trainer" / "losses.py")
    renamed = described(checkout)
    (checkout / "trainer" / "losses.py").unlink()
    assert len({whole.digest, renamed.digest, described(checkout).digest}) == 3


def test_what_does_not_go_in_changes_nothing(checkout: Path) -> None:
    before = described(checkout)
    append(checkout / "README.md", "changed")
    append(checkout / "deploy" / "new.py", "changed")
    append(checkout / "trainer" / "__pycache__" / "loss.cpython-311.pyc", "changed")
    (checkout / "trainer" / "loss.py").touch()
    assert described(checkout) == before


@pytest.mark.parametrize(
    "where", ["constraints.txt", "Dockerfile before the code", "the trainer's requirements"]
)
def test_a_change_of_what_is_installed_names_other_packages(checkout: Path, where: str) -> None:
    before = described(checkout)
    if where == "constraints.txt":
        append(checkout / where, "\n# changed\n")
    elif where.startswith("Dockerfile"):
        text = (checkout / "Dockerfile").read_text()
        (checkout / "Dockerfile").write_text(text.replace("AS packages", "AS packages\nRUN true", 1))
    else:
        text = (checkout / "pyproject.toml").read_text()
        (checkout / "pyproject.toml").write_text(text.replace('"torch>=', '"einops",\n  "torch>=', 1))
    after = described(checkout)
    assert after.packages != before.packages
    assert after.reference != before.reference


def test_other_lines_of_pyproject_and_of_the_code_stage_leave_the_packages_alone(checkout: Path) -> None:
    before = described(checkout)
    append(checkout / "pyproject.toml", "\n[tool.other]\nkey = 1\n")
    append(checkout / "Dockerfile", "\nLABEL changed=1\n")
    after = described(checkout)
    assert after.packages == before.packages
    assert after.reference != before.reference


@pytest.mark.parametrize(
    "settings",
    [{"variant": "gpu"}, {"base": "debian:trixie-slim"}, {"torch_index_url": "https://example.org/cpu"}],
)
def test_variant_base_and_index_go_into_both_names(checkout: Path, settings: Mapping[str, str]) -> None:
    plain, other = described(checkout), described(checkout, **settings)
    assert other.packages != plain.packages
    assert other.reference != plain.reference


def test_the_context_is_what_the_dockerignore_lets_in(checkout: Path) -> None:
    """`docker compose up` builds from the directory, a deploy from these files: they are the same."""
    lines = (CHECKOUT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == {
        *image.FILES,
        *image.CODE,
    } - {"Dockerfile"}
    lines = (CHECKOUT / "Dockerfile").read_text().splitlines()
    copied = [line.split() for line in lines if line.startswith("COPY ")]
    sources = {word for words in copied if not words[1].startswith("--from") for word in words[1:-1]}
    assert sources == {*image.FILES, *image.CODE} - {"Dockerfile"}


def test_a_file_that_cannot_be_read_is_named_with_the_remedy(checkout: Path) -> None:
    (checkout / "constraints.txt").unlink()
    with pytest.raises(DeployError, match=r"constraints.txt cannot be read .* a whole checkout"):
        described(checkout)


def test_a_dockerfile_without_its_last_stage_is_refused(checkout: Path) -> None:
    (checkout / "Dockerfile").write_text("FROM debian\n")
    with pytest.raises(DeployError, match="Dockerfile has no stage"):
        described(checkout)


def facts(*tags: str) -> dict:
    return {"images": [{"id": "sha256:1", "tags": list(tags)}, {"id": "sha256:2", "tags": None}]}


def test_an_image_that_is_there_is_neither_built_nor_shipped(checkout: Path) -> None:
    one = described(checkout)
    for build in ("host", "local"):
        assert image.plan(facts(one.packages, one.reference), one, build) == "there"
    assert image.words(facts(one.reference), one, "there", "gpu-box") == "there"


@pytest.mark.parametrize(
    ("build", "action", "words"),
    [
        ("host", "build", "build on gpu-box (with its packages: minutes)"),
        ("local", "ship", "build here and ship to gpu-box"),
    ],
)
def test_the_plan_says_where_it_is_built_and_what_travels(checkout, build, action, words) -> None:
    one = described(checkout)
    assert image.plan(facts(), one, build) == action
    assert image.words(facts(), one, action, "gpu-box") == words
    assert image.words(facts(one.packages), one, action, "gpu-box").startswith("build on gpu-box (code only")


def test_facts_without_an_engine_mean_that_nothing_is_there(checkout: Path) -> None:
    assert image.plan({"images": None}, described(checkout), "host") == "build"
    assert image.plan({}, described(checkout), "host") == "build"


def test_the_context_travels_as_the_same_bytes_each_time(checkout: Path) -> None:
    files = described(checkout).files
    packed = image._tar(files)
    assert packed == image._tar(dict(reversed(files.items())))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert {m.name: archive.extractfile(m).read() for m in archive} == dict(files)


def test_an_image_cannot_be_changed(checkout: Path) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        described(checkout).digest = "other"  # type: ignore[misc]
