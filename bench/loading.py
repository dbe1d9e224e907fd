"""What loading a target costs in memory: python bench/loading.py [--mib 640] [--rounds 3]

A model of a real kind (Llama, bfloat16, in several safetensors files, random weights) in shared memory is
loaded in a process of its own, and every page of it is read once: by trainer.target.Target.load, by
AutoModelForCausalLM.from_pretrained with its defaults, and by torch.load from a file that torch.save wrote.
Measured is the memory that it takes at its peak, against the size of the weights: the files in shared memory,
which are there anyway and count once however many have them mapped, and the anonymous memory (RssAnon) that
the process takes beyond what it had before. 1 is what the weights themselves take, 2 is a second copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOOK = 0.002  # seconds between two looks at our memory
WAYS = ("ours", "from_pretrained", "torch.load")
LIMIT = 1.1  # × the weights


def make(place: Path, mib: int) -> int:
    """A model of about so many MiB, twice: as safetensors and as a file of torch's. Bytes of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 32000}
    layers = max(1, (mib - 125) // 32)
    config = LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(place / "model", max_shard_size="200MB")
    torch.save(model.state_dict(), place / "model.pt")
    return sum(parameter.nbytes for parameter in model.parameters())


def anonymous() -> int:
    """Bytes of memory that this process has to itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def load(way: str, place: Path) -> None:
    """Load in one way and say {"added": bytes, "seconds": …}."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401  (not a part of what is measured)

    from trainer.target import Target

    before, peak, over = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(LOOK):
            peak[0] = max(peak[0], anonymous())

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.monotonic()
    if way == "ours":
        tensors = list(Target.load(place / "model", torch.bfloat16).model.parameters())
    elif way == "from_pretrained":
        tensors = list(AutoModelForCausalLM.from_pretrained(place / "model").parameters())
    else:
        tensors = list(torch.load(place / "model.pt", weights_only=True).values())
    for tensor in tensors:
        tensor.data.view(-1).view(torch.uint8)[::4096].max()
    seconds = time.monotonic() - began
    over.set()
    watching.join()
    print(json.dumps({"added": max(peak[0], anonymous()) - before, "seconds": seconds}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=640, help="size of the model (default 640)")
    parser.add_argument("--rounds", type=int, default=3, help="loads in each way (default 3)")
    parser.add_argument("--load", nargs=2, metavar=("WAY", "PLACE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load(options.load[0], Path(options.load[1]))
        return 0
    from bench._results import percentile, record

    place = Path(tempfile.mkdtemp(prefix="drafthouse-loading-", dir="/dev/shm"))
    try:
        size = make(place, options.mib)
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                argv = [sys.executable, __file__, "--load", way, str(place)]
                done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, env={**os.environ})
                said = json.loads(done.stdout)
                found[way].append(1 + said["added"] / size)
                print(f"{way:16} {found[way][-1]:5.3f} × the weights, {said['seconds']:.2f} s", flush=True)
    finally:
        shutil.rmtree(place)
    ours = percentile(found["ours"], 50)
    claim = f"peak memory of loading a target of {size / 1e6:.0f} MB from /dev/shm"
    for against in WAYS[1:]:
        theirs = percentile(found[against], 50)
        record(claim, against, ours=ours, theirs=theirs, unit="× the weights", n=options.rounds)
    record(claim, f"{LIMIT} × the weights", ours=ours, theirs=LIMIT, unit="× the weights", n=options.rounds)
    return int(ours > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
