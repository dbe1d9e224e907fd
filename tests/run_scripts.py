"""Scripts as people write them to start a training, and a bash that runs them with a Python that only tells."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import time
from pathlib import Path

# The script of the mission, as the run behind it was started.
CASE = r"""#!/bin/bash
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512
export CUDA_MODULE_LOADING=LAZY
export PYTHONUNBUFFERED=1
export PATH=/usr/local/cuda/bin:$PATH
source /root/venv/bin/activate
rm -rf /tmp/torchinductor_root
nohup python3 -u /root/train_dflash_pipeline.py \
    --target-model /dev/shm/Qwen3.6-27B --data-dir /workspace/tokenized_completions \
    --output-dir /workspace/checkpoints \
    --target-gpus 0,1,2,3,4 --drafter-gpus 5,6,7 \
    --epochs 6 --lr 6e-4 --warmup-ratio 0.04 --weight-decay 0.01 --grad-accum 4 --grad-clip 1.0 \
    --token-budget 49152 --max-seq-len 8192 --max-batch-size 64 \
    --block-size 32 --max-anchors 1024 --num-draft-layers 5 --gamma 10.0 \
    --noise-start 0.05 --noise-end 0.01 --noise-type uniform \
    --use-soft-labels --kl-weight 0.15 --kl-temperature 2.0 --cap-lambda 0.1 \
    --save-interval 2000 --wandb-project dflash-qwen36-27b --wandb-run-name exp-ddtree-tl-fix \
    > /workspace/train_opt2.log 2>&1 &
disown
"""

# Each starts one program, and everything that this program gets can be known.
VARIATIONS = {
    "continuations": "cd /workspace\npython3 -u train.py \\\n  --lr 1e-4 \\\n  --name a\\\nb --epochs \\\n 3\n",
    "background": "nohup python3 /root/train.py --x 1 > /workspace/log 2>&1 &\necho $! > /workspace/pid\n",
    "source": 'cd /workspace && . "/root/venv/bin/activate"\nexec python3 train.py\n',
    "variables": 'MODEL=/dev/shm/x; OUT="${OUT:-/workspace/out dir}"\n'
    'python3 train.py --target-model $MODEL --out "$OUT" --seed ${SEED:-7} "$@" --last ${NOTHING} ${X-}\n',
    "dirname": 'cd "$(dirname "$0")"\nHERE=$(pwd)\nexec python3 "$HERE/train.py" --here `pwd` ${0##*/} "${0%/*}"\n',
    "here": 'HERE="$( cd "$( dirname "${BASH_SOURCE[0]}" )" >/dev/null 2>&1 && pwd )"\npython3 $HERE/t.py\n',
    "quotes": "python3 t.py 'a b' \"c  d\" e\\ f $'g\\th\\x41\\'' \"i'j\"'k\"l' \"\" '' \"m\\$n\\\"o\\\\p\\q\" x\"y\"'z'\\!\n"
    "true\n",
    "mixed": 'A="one  two" B=\'$A\'; python3 t.py $A "$A" pre"$A"post $B "$A $B" "${A}x" $A$B "$A" \'\'$EMPTY \n',
    "redirections": "python3 t.py --a 1 >> /workspace/log 2>> /workspace/err < /dev/null &\n",
    "both": "python3 t.py --a 1 &> /workspace/other\n",
    "tee": "set -eo pipefail\npython3 t.py --b 2 2>&1 | tee -a /workspace/log\n",
    "prefix": "CUDA_VISIBLE_DEVICES=0,1 OMP_NUM_THREADS=4 python3 t.py --x\n",
    "env": 'export GONE=1\nenv A=b "C=d e" -u GONE python3 t.py\n'.replace('A=b "C=d e" -u GONE', '-u GONE A=b "C=d e"'),
    "limits": "ulimit -n 512\nulimit -c 0\nmkdir -p /workspace/out\nsleep 0\numask 022\nnice -n 3 python3 t.py\n",
    "accelerate": "accelerate launch --num_processes 8 --mixed_precision=bf16 train.py --lr 1e-4\n",
    "torchrun": "export MASTER_PORT=29501\ntorchrun --nproc_per_node=8 --master_port $MASTER_PORT train.py\n",
    "module": "N=$((4 * 2 + 1 - 1)); python3 -m torch.distributed.run --nproc-per-node $N train.py\n",
    "deepspeed": "deepspeed --include localhost:0,1 train.py --deepspeed ds.json\n",
    "arrays": 'ARGS=(--a 1 --name "b c")\nARGS+=(--last)\nMORE=( $EMPTY )\n'
    'python3 t.py "${ARGS[@]}" "${MORE[@]}" ${#ARGS[@]} "${ARGS[1]}" x"${ARGS[@]}"y ${ARGS[*]}\n',
    "heredoc": "cat > /workspace/config.yaml <<EOF\nlr: 1\nhome: $HOME\nEOF\npython3 t.py --config /workspace/config.yaml\n",
    "if": 'if [ -d /root/venv ]; then source /root/venv/bin/activate; else exit 1; fi\n'
    'if [[ -z "$SEED" && ! -f /nowhere ]]; then SEED=3; fi\n[ "$SEED" = 3 ] && EXTRA="--three"\npython3 t.py $EXTRA\n',
    "cases": 'MODE=${1:-full}\ncase "$MODE" in\n  fast|quick) ARGS="--max-steps 10" ;;\n  f*) ARGS="--epochs 6" ;;\n'
    "  *) exit 2 ;;\nesac\npython3 t.py $ARGS\n",
    "function": 'run() {\n  local name=$1; shift\n  python3 t.py --name "$name" "$@"\n}\nrun "first one" --x 1\n',
    "inner": "export OUTER=1\nHIDDEN=2\nbash -c 'python3 t.py --outer \"$OUTER\" --hidden \"$HIDDEN\" $0 $1' zero one\n",
    "other": "echo 'export LEVEL=${1:-none}; OWN=\"a b\"' > /dev/null\nsource /root/env.sh debug\npython3 t.py $LEVEL \"$OWN\"\n",
    "braces": "python3 t.py {a,b}.x --n{1..3} {07..09} '{a,b}' {solo} a{b,c{d,e}}f \"{x,y}\" {\"k\":1} ~/d --h=~/d H=~/d\n",
    "defaults": 'A="x y"; python3 t.py "${B:-$A z}" ${B:-$A z} "a ${A} ${B:-"q  r"} ${B-é} ${A:+set $A}" "${A:-no} ${#A}" ${B:=w} $B\n',
    "strings": 'P=/a/b/c.tar.gz; python3 t.py ${P##*/} ${P%%.*} ${P%.gz} ${P#/a} ${#P} ${P/b/X} ${P:2:3} ${P^^} ${Q:+no} ${P:+yes}\n',
    "subshell": "LR=1\n( cd /workspace; LR=2; nohup python3 t.py --lr $LR ) > /workspace/log 2>&1 &\nwait\n",
    "group": "{ export IN=1; python3 t.py; } >> /workspace/log 2>&1\n",
    "exports": "set -a\nALL=1\nset +a\nNOT=2\ndeclare -x DECLARED='x y'\nexport A=1 B=\"$ALL$NOT\"\nexport -n A\nunset ALL\nexport NOT\n"
    "readonly C=3\npython3 t.py\n",
    "comments": "# python3 old.py\n\npython3 t.py --a '#1' # --b\n#python3 other.py\n",
    "semicolons": "cd /workspace || exit 1; export A=1; python3 t.py && echo done || echo failed\n",
    "timeout": "timeout -k 5 2h stdbuf -oL python3 -u t.py\n",
    "lines": "E= A=1\nexport A\nE= F=2\nB=3 C=\\\n4 python3 t.py $E$F\n",
    "unicode": "python3 t.py --name 'drafté 日本' \"naïve\"\n",
}


class Bash:
    """A directory that stands for a host's root, with a venv and a Python that tells how it was called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "root"
        self.out = root / "told"
        for place in (self.home / "venv" / "bin", root / "workspace", root / "stub", self.out):
            place.mkdir(parents=True)
        stub = f"#!/bin/sh\ncat /proc/$$/cmdline > {self.out}/argv; cat /proc/$$/environ > {self.out}/environ\n"
        stub += f"readlink /proc/$$/cwd > {self.out}/cwd; ulimit -n > {self.out}/nofile; echo > {self.out}/done\n"
        for place, names in (
            (root / "stub", ("accelerate", "torchrun", "deepspeed", "python3")),
            (self.home / "venv" / "bin", ("python3",)),
        ):
            for name in names:
                (place / name).write_text(stub)
                (place / name).chmod(0o755)
        (self.home / "env.sh").write_text('export LEVEL=${1:-none}\nOWN="a b"\n')
        text = (Path(sysconfig.get_path("stdlib")) / "venv/scripts/common/activate").read_text()
        for key, value in {"VENV_DIR": self.home / "venv", "VENV_BIN_NAME": "bin", "VENV_PROMPT": "(venv) "}.items():
            text = text.replace(f"__{key}__", str(value))
        (self.home / "venv" / "bin" / "activate").write_text(text)
        self.login = {"HOME": str(self.home), "PATH": f"{root}/stub:/usr/bin:/bin", "LANG": "C.UTF-8"}

    def placed(self, script: str) -> str:
        """`script` with its places below our root, so that it touches nothing else."""
        for place in ("/root", "/workspace", "/tmp/torchinductor", "/dev/shm"):
            script = script.replace(place, f"{self.root}{place}")
        return script

    def run(self, script: str) -> tuple[list[str], dict[str, str], str, str]:
        """(argv, environment, working directory, limit of open files) of the one Python that it starts."""
        path = self.home / "run.sh"
        path.write_text(self.placed(script))
        subprocess.run(
            ["bash", str(path)], cwd=self.home, env=self.login, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False, timeout=60,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while not (self.out / "done").exists():  # it may be in the background
            assert time.monotonic() < deadline, script
            time.sleep(0.005)
        argv = os.fsdecode((self.out / "argv").read_bytes()).split("\0")[1:-1]
        variables = os.fsdecode((self.out / "environ").read_bytes()).split("\0")[:-1]
        environment = dict(one.partition("=")[::2] for one in variables)
        told = [(self.out / name).read_text().strip() for name in ("cwd", "nofile")]
        return argv, environment, told[0], told[1]
