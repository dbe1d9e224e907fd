P=/a/b/c.tar.gz; python3 t.py ${P##*/} ${P%%.*} ${P%.gz} ${P#/a} ${#P} ${P/b/X} ${P:2:3} ${P^^} ${Q:+no} ${P:+yes}
