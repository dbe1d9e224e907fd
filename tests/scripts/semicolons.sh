cd /workspace || exit 1; export A=1; python3 t.py && echo done || echo failed
