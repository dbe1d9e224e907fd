{ export IN=1; python3 t.py; } >> /workspace/log 2>&1
