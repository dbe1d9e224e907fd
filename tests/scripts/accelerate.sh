accelerate launch --num_processes 8 --mixed_precision=bf16 train.py --lr 1e-4
