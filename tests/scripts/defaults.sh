A="x y"; python3 t.py "${B:-$A z}" ${B:-$A z} "a ${A} ${B:-"q  r"} ${B-é} ${A:+set $A}" "${A:-no} ${#A}" ${B:=w} $B
