python3 t.py --a 1 >> /workspace/log 2>> /workspace/err < /dev/null &
