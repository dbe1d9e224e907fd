E= A=1
export A
E= F=2
B=3 C=\
4 python3 t.py $E$F
