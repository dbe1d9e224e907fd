#!/bin/bash
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
