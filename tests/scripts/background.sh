nohup python3 /root/train.py --x 1 > /workspace/log 2>&1 &
echo $! > /workspace/pid
