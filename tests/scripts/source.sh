cd /workspace && . "/root/venv/bin/activate"
exec python3 train.py
