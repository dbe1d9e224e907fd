cat > /workspace/config.yaml <<EOF
lr: 1
home: $HOME
EOF
python3 t.py --config /workspace/config.yaml
