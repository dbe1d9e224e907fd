# The common commands. `make` alone shows the menu; `fab --list` has more of them.
#
#   HOST=gpu-box   a host of fabric.yaml or of the SSH configuration (default: this machine)
#   RUN=demo       a file of runs/, or a path                         NAME=demo   the experiment
#   PYTHON=…       the interpreter for .venv (default: the newest of python3.13 … python3.11, python3)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:

VENV := .venv
HOST ?=
NAME ?=
RUN ?=
PYTHON ?=
TESTS ?=
# Tests wait for processes part of the time, so there are more workers than CPUs; each takes half a GB.
CPUS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CPUS) < 8 ? $(CPUS) + 2 : 10)))
# The fast ones hardly wait, and each worker imports torch and collects all tests: 10 s of a CPU.
FAST_WORKERS ?= $(shell echo $$(($(CPUS) < 8 ? $(CPUS) + 1 : 8)))
# Values reach the recipes through the environment, as they are: neither make nor the shell reads them as code.
override HOST := $(value HOST)
override NAME := $(value NAME)
override RUN := $(value RUN)
override PYTHON := $(value PYTHON)
export HOST NAME RUN PYTHON
FLAGS = $(if $(HOST),--host "$$HOST") $(if $(NAME),--name "$$NAME")

.PHONY: help
help:  ## this menu
	@echo 'usage: make TASK [HOST=gpu-box] [NAME=experiment] [RUN=file]'
	@awk -F ':.*## ' '/^## /{print "\n" substr($$0, 4)} /^[a-z-]+:.*## /{printf "  %-13s%s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

## Run
.PHONY: demo deploy status tail restart stop start rollback diff pull tensorboard
demo: $(VENV)/.deploy,trainer  ## train a small drafter on this machine, and watch it learn
	@$(VENV)/bin/fab deploy --host "$${HOST:-localhost}" --run "$${RUN:-demo}" $(if $(NAME),--name "$$NAME")

deploy: $(VENV)/.deploy  ## start RUN on HOST and follow its log (Ctrl-C ends the following, not the run)
	@$(VENV)/bin/fab deploy $(FLAGS) $(if $(RUN),--run "$$RUN")

status: $(VENV)/.deploy  ## what runs, and how it is doing
	@$(VENV)/bin/fab status $(FLAGS)

tail: $(VENV)/.deploy  ## follow the log of a run
	@$(VENV)/bin/fab tail $(FLAGS)

restart: $(VENV)/.deploy  ## save a checkpoint, stop, and start again with the files as they are now
	@$(VENV)/bin/fab restart $(FLAGS) $(if $(RUN),--run "$$RUN")

stop: $(VENV)/.deploy  ## save a checkpoint and stop
	@$(VENV)/bin/fab stop $(FLAGS)

start: $(VENV)/.deploy  ## start what is deployed again, if it does not run
	@$(VENV)/bin/fab start $(FLAGS)

rollback: $(VENV)/.deploy  ## stop, and start the release before this one
	@$(VENV)/bin/fab rollback $(FLAGS)

diff: $(VENV)/.deploy  ## what is deployed against what would be rendered now
	@$(VENV)/bin/fab diff $(FLAGS) $(if $(RUN),--run "$$RUN")

pull: $(VENV)/.deploy  ## bring the newest checkpoint here, into pulled/
	@$(VENV)/bin/fab pull $(FLAGS)

tensorboard: $(VENV)/.deploy,trainer  ## curves of this machine's runs: loss, tok/s, τ, memory
	@state=$$HOME/.local/state/drafthouse; [ "$$(id -u)" != 0 ] || state=/var/lib/drafthouse; \
	$(VENV)/bin/tensorboard --logdir "$${DRAFTHOUSE_STATE:-$$state}/runs" --load_fast=false

## Check
.PHONY: test test-fast lint bench bench-peers testbed
test: $(VENV)/.deploy,trainer,dev  ## every test that this machine can run; what is left out is named at the end
	@$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadgroup $(TESTS)

test-fast: $(VENV)/.deploy,trainer,dev  ## the tests that need no engine and take no time
	@$(VENV)/bin/python -m pytest -n $(FAST_WORKERS) --dist worksteal -m 'not slow and not engine' $(TESTS)

lint: $(VENV)/.deploy,trainer,dev  ## style, types, and the directions between the packages
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports

# bench/smollm2.py is left out: a real training, which takes hours and a place to keep it in.
bench: $(VENV)/.deploy,trainer,dev  ## measure what the README claims; writes bench/results.json
	@for file in $(filter-out bench/smollm2.py,$(wildcard bench/[a-z]*.py)); do $(VENV)/bin/python "$$file"; done

bench-peers: .venv-peers/.done  ## install what bench/step.py compares with (1.5 GB), into .venv-peers

testbed:  ## install what the tests of engine and SSH need, by apt (as root)
	@python3 -m tests.testbed install
	@python3 -m tests.testbed doctor

## Keep
.PHONY: bootstrap prune compose lock clean
bootstrap: $(VENV)/.deploy  ## install what a Debian or Ubuntu HOST lacks, after saying what
	@$(VENV)/bin/fab bootstrap $(if $(HOST),--host "$$HOST")

prune: $(VENV)/.deploy  ## remove what nothing uses from HOST, after asking
	@$(VENV)/bin/fab prune $(FLAGS)

compose: $(VENV)/.deploy  ## render compose.yaml from templates/compose.yaml.j2
	@$(VENV)/bin/python -m deploy.runtimes.compose >compose.yaml.new && mv compose.yaml.new compose.yaml

lock:  ## pin what pip resolves today in constraints.txt
	@tests/testbed/lock.sh

clean:  ## remove .venv and what tests and tools keep here
	@for file in /proc/[0-9]*/cmdline; do \
	  if { IFS= read -r -d '' python <"$$file"; } 2>/dev/null && [[ $$python == '$(CURDIR)/$(VENV)/'* ]] \
	    && grep -qzxF trainer.launch "$$file" 2>/dev/null; then \
	    pid=$${file#/proc/}; \
	    echo "A run in progress uses $(VENV) (pid $${pid%/cmdline}): stop it with make stop, then make clean." >&2; \
	    exit 1; \
	  fi; \
	done
	@rm -rf $(VENV) .venv-peers .testbed .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- .venv -----------------------------------------------------------------------------------------------
# One stamp for each set of extras: .venv/.deploy is a client without torch. Installed again only when the
# requirements change; the code is installed as editable, and needs no reinstall.
$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing into $(VENV): $* (the log is $(VENV)/install.log)"
	@# The pip that comes with Python 3.11 takes three times as long; without a network it will do.
	@$(VENV)/bin/python -m pip install -q -c constraints.txt --upgrade pip >$(VENV)/install.log 2>&1 || true
	@# Read by the shell, line by line: mawk, Debian's awk, would hold the lines back.
	@if ! PYTHONUNBUFFERED=1 $(VENV)/bin/python -m pip install --progress-bar off -c constraints.txt -e '.[$*]' 2>&1 \
	  | tee $(VENV)/install.log \
	  | while IFS= read -r line; do \
	    case "$$line" in \
	      *MB\)|*GB\)) echo "$$line";; \
	      Processing*.whl) echo "  $${line##*/}";; \
	      'Installing collected'*) set -- $$line; echo "  installing $$(($$# - 3)) packages; this takes a while";; \
	    esac; \
	  done; \
	then \
	  grep -v '^ ' $(VENV)/install.log | tail -n 20; \
	  echo 'pip could not install the packages; its last lines are above.' >&2; exit 1; \
	fi
	@# What has more has less, too.
	@for set in deploy deploy,trainer deploy,trainer,dev; do \
	  case '$*' in "$$set"*) touch "$(VENV)/.$$set";; esac; \
	done; touch '$@'

# The peers' trainers have requirements that exclude each other (sglang, megatron, versions of transformers) and
# that their DFlash modules do not need: those are installed as they are, with what they import beside them, and
# with our own version of torch.
.venv-peers/.done: bench/peers.txt constraints.txt | $(VENV)/bin/pip
	@echo 'Installing into .venv-peers: specforge, speculators, nemo-automodel'
	@$(VENV)/bin/python -m venv --clear .venv-peers
	@.venv-peers/bin/python -m pip install -q "$$(grep '^torch==' constraints.txt)" -r <(sed '/^# alone$$/,$$d' bench/peers.txt)
	@.venv-peers/bin/python -m pip install -q --no-deps -r <(sed '1,/^# alone$$/d' bench/peers.txt)
	@touch $@

$(VENV)/bin/pip:
	@python=''; wanted="$${PYTHON:-python3}"; \
	if [ -n "$$PYTHON" ]; then set -- "$$PYTHON"; else set -- python3.13 python3.12 python3.11 python3; fi; \
	for candidate in "$$@"; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11 or later is needed, and $$wanted is" \
	    "$$("$$wanted" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo missing):" \
	    "install it, or name one with PYTHON=/path/to/python3." >&2; \
	  exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$python lacks the venv module: as root, apt-get install python3-venv, or name another with PYTHON=…" >&2; \
	  exit 1; \
	fi; \
	rm -rf $(VENV); \
	"$$python" -m venv $(VENV)
