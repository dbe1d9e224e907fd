"""Stand-ins for what no test machine has. Each is as strict as what it stands for."""
