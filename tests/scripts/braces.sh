python3 t.py {a,b}.x --n{1..3} {07..09} '{a,b}' {solo} a{b,c{d,e}}f "{x,y}" {"k":1} ~/d --h=~/d H=~/d
