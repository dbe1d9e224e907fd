export GONE=1
env -u GONE A=b "C=d e" python3 t.py
