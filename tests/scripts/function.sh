run() {
  local name=$1; shift
  python3 t.py --name "$name" "$@"
}
run "first one" --x 1
