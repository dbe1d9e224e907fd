python3 t.py 'a b' "c  d" e\ f $'g\th\x41\'' "i'j"'k"l' "" '' "m\$n\"o\\p\q" x"y"'z'\!
true
