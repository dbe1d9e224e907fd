python3 t.py 'a b' "c  d" e\ f $'g\th\x41\'\u00e9\xc3\xa9\101' "i'j"'k"l' "" '' "m\$n\"o\\p\q" x"y"'z'\!
true
