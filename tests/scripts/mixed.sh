A="one  two" B='$A'; python3 t.py $A "$A" pre"$A"post $B "$A $B" "${A}x" $A$B "$A" ''$EMPTY 
