# python3 old.py

python3 t.py --a '#1' # --b
#python3 other.py
