timeout -k 5 2h stdbuf -oL python3 -u t.py
