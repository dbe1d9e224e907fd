ARGS=(--a 1 --name "b c")
ARGS+=(--last)
MORE=( $EMPTY )
python3 t.py "${ARGS[@]}" "${MORE[@]}" ${#ARGS[@]} "${ARGS[1]}" x"${ARGS[@]}"y ${ARGS[*]}
