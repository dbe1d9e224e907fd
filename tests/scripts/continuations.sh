cd /workspace
python3 -u train.py \
  --lr 1e-4 \
  --name a\
b --epochs \
 3
