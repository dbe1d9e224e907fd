set -a
ALL=1
set +a
NOT=2
declare -x DECLARED='x y'
export A=1 B="$ALL$NOT"
export -n A
unset ALL
export NOT
readonly C=3
python3 t.py
