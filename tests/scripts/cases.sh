MODE=${1:-full}
case "$MODE" in
  fast|quick) ARGS="--max-steps 10" ;;
  f*) ARGS="--epochs 6" ;;
  *) exit 2 ;;
esac
python3 t.py $ARGS
