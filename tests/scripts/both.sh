python3 t.py --a 1 &> /workspace/other
