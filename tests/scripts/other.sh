echo 'export LEVEL=${1:-none}; OWN="a b"' > /dev/null
source /root/env.sh debug
python3 t.py $LEVEL "$OWN"
