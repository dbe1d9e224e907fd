cd "$(dirname "$0")"
HERE=$(pwd)
exec python3 "$HERE/train.py" --here `pwd` ${0##*/} "${0%/*}"
