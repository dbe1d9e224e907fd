"""The image, built by a real engine from the top-level Dockerfile."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from testbed import base_image
from testbed.docker import Docker
from testbed.place import CHECKOUT, TestbedError

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def inspect(engine: Docker, image: str) -> dict:
    return json.loads(engine.run("image", "inspect", image))[0]


def test_the_image_starts_tini_as_a_user_without_rights(engine: Docker, image: str) -> None:
    config = inspect(engine, image)["Config"]
    assert config["Entrypoint"] == ["tini", "--"]
    assert config["User"] == "drafthouse"
    script = "import os; print(os.getuid(), os.getgid(), open('/proc/1/comm').read().strip())"
    assert engine.run("run", "--rm", image, "python", "-c", script).split() == ["10001", "10001", "tini"]


def test_python_is_unbuffered_in_the_image_and_in_what_it_starts(engine: Docker, image: str) -> None:
    script = (
        "import subprocess, sys\n"
        "print(sys.stdout.write_through, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import sys; print(sys.stdout.write_through)'])\n"
    )
    assert engine.run("run", "--rm", image, "python", "-c", script).split() == ["True", "True"]


def test_no_secret_and_no_package_index_stays_in_the_image(engine: Docker, image: str) -> None:
    """Configuration and certificates of the builder are this machine's: the product's layers hold neither."""
    ours = engine.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    base = engine.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", base_image.PYTHON)
    own_layers = "\n".join(line for line in ours.splitlines() if line not in base.splitlines())
    variables, inherited = (inspect(engine, name)["Config"]["Env"] for name in (image, base_image.PYTHON))
    environment = "\n".join(set(variables) - set(inherited))
    for text in (own_layers, environment):
        assert not re.search(r"https?://|password|token|secret(?!,id=pip)|_KEY", text, re.I), text
    places = "/root/.config /root/.cache /run/secrets /tmp"
    listed = engine.run("run", "--rm", "--user", "0", image, "sh", "-c", f"find {places} 2>&1; true")
    assert not re.search(r"pip(/|\.conf)|requirements", listed), listed


def test_a_change_of_the_trainer_builds_only_the_last_small_layers_again(
    engine: Docker, image: str, tmp_path: Path
) -> None:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((CHECKOUT / name).read_bytes())
    for directory in ("trainer", "runs"):
        (tmp_path / directory).mkdir()
        for file in (CHECKOUT / directory).iterdir():
            if file.is_file():
                (tmp_path / directory / file.name).write_bytes(file.read_bytes())
    (tmp_path / "trainer" / "__init__.py").write_text("# changed\n")
    with open(tmp_path / "pyproject.toml", "a") as settings:
        settings.write("\n# changed too, but not in what the trainer needs\n")
    engine.run("build", "-q", "-t", "drafthouse:changed", tmp_path, timeout=120)
    before, after = (inspect(engine, name)["RootFS"]["Layers"] for name in (image, "drafthouse:changed"))
    assert after != before
    assert after[:-3] == before[:-3], "only the code, its bytecode, and the working directory's empty layer"


def test_a_bare_debian_without_python_or_tini_will_do_as_the_base(base_images: Docker) -> None:
    name = "drafthouse:bare-debian"
    chosen = ["--build-arg", f"BASE_IMAGE={base_image.DEBIAN}", "--build-arg", "VARIANT=gpu"]
    base_images.run("build", "-q", "--target", "base", *chosen, "-t", name, CHECKOUT, timeout=600)
    script = (
        "command -v tini; python3 -m venv /tmp/venv; cd /tmp; echo '#include <Python.h>' >a.c;"
        "gcc -c -I$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"include\"))') a.c; ls a.o"
    )
    assert "a.o" in base_images.run("run", "--rm", name, "sh", "-ec", script)


def test_an_unknown_variant_is_refused_in_one_sentence(base_images: Docker) -> None:
    words = ["build", "--progress=plain", "--target", "base", "--build-arg", "VARIANT=tpu", str(CHECKOUT)]
    with pytest.raises(TestbedError, match="VARIANT is 'tpu': use cpu or gpu"):
        base_images.run(*words, timeout=300)
