LR=1
( cd /workspace; LR=2; nohup python3 t.py --lr $LR ) > /workspace/log 2>&1 &
wait
