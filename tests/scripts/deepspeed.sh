deepspeed --include localhost:0,1 train.py --deepspeed ds.json
