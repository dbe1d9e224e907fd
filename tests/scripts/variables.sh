MODEL=/dev/shm/x; OUT="${OUT:-/workspace/out dir}"
python3 train.py --target-model $MODEL --out "$OUT" --seed ${SEED:-7} "$@" --last ${NOTHING} ${X-}
