f() {
  local X=1 Y
  Y="$X$1"
  OUT="$Y"
  [ "$2" ] && return
  Z=left
}
X=9
f a
f b stop
case "$X" in 9) export X ;; esac
python3 t.py "$X" "$OUT" "$Z" "${Y-unset}"
