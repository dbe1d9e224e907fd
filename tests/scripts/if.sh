if [ -d /root/venv ]; then source /root/venv/bin/activate; else exit 1; fi
if [[ -z "$SEED" && ! -f /nowhere ]]; then SEED=3; fi
[ "$SEED" = 3 ] && EXTRA="--three"
python3 t.py $EXTRA
