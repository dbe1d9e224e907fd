N=$((4 * 2 + 1 - 1)); python3 -m torch.distributed.run --nproc-per-node $N train.py
