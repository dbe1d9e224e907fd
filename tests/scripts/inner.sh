export OUTER=1
HIDDEN=2
bash -c 'python3 t.py --outer "$OUTER" --hidden "$HIDDEN" $0 $1' zero one
