"""What every `fab` does first, done once: a module for `forked.Python` to preload, in a checkout.

Modules are read, templates compiled, and what is sent to hosts most is packed; our scripts for this machine
fork, too (see `forked_onhost`). The command line, the project's files, and all that is asked of a host are
read by each `fab` itself.
"""

# ruff: noqa: E402
from __future__ import annotations

import importlib
import sys

sys.argv = ["fab"]  # what deploy.interrupt looks for: whether it is `fab` itself

import fabric.main  # noqa: F401
import forked_onhost

from deploy import onhost, render

MODULES = (
    "actions", "again", "boot", "bootunit", "compare", "conduct", "drift", "drift_check", "early",
    "execute", "executor", "explain", "logs", "menu", "output", "overview", "parsing", "plan", "prefixed",
    "prune", "pull", "runtimes.compose", "show", "ssh", "switch", "survey",
)  # fmt: skip
SENT = (
    "leftovers", "lock_holder", "log_reader", "lookup", "new_run", "probe", "release_store", "switch_job",
    "switch_watch", "unitfile",
)  # fmt: skip

for name in MODULES:
    importlib.import_module(f"deploy.{name}")
for name in SENT:
    for ours in (True, False):
        onhost._packed(f"deploy.{name}", ours)
for template in render._environment.list_templates():
    if template.endswith(".j2"):
        render._environment.get_template(template)
forked_onhost.use()
