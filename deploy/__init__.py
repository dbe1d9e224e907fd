"""What runs on your own machine: settings, plan, and the switch on a host."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent  # this code, and the trainer that it deploys
