python3 t.py --name 'drafté 日本' "naïve"
