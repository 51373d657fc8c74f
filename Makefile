# `make report` and `make test` do all the set-up they need; nothing but Python 3.11 or newer, make and git is assumed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= report
# JupyterLab forgets a widget's state on saving unless told otherwise.
SETTINGS := $(VENV)/share/jupyter/lab/settings
KEEP_WIDGETS := {"@jupyter-widgets/jupyterlab-manager:plugin": {"saveState": true}}
# OpenMP's idle threads would spin, which is ruinous where anything else wants the same cores.
export OMP_WAIT_POLICY ?= passive

.DEFAULT_GOAL := help
.PHONY: help setup pins report report-full test lab figures record-figures browser clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 16

# environment.yml holds the one list of pins; conda reads it whole, pip gets these lines of it.
pins: ## print the exact pins that setup installs
	@sed -nE 's/^ +- ([A-Za-z0-9_.-]+==[^ ]+)$$/\1/p' environment.yml

$(BIN)/.ready: environment.yml pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory -s pins > $(VENV)/pins.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-script-location -r $(VENV)/pins.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@mkdir -p $(SETTINGS) && echo '$(KEEP_WIDGETS)' > $(SETTINGS)/overrides.json
	@touch $@

setup: $(BIN)/.ready ## make the environment in .venv

report: setup ## the quick report, into report/index.html
	$(BIN)/batch-variance report --quick --out $(OUT)

report-full: setup ## the full report
	$(BIN)/batch-variance report --out $(OUT)

# The page tests drive a real browser; on Debian and Ubuntu it is installed here where it is missing and that is allowed.
browser:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } \
		|| { echo "the page tests need Chromium: install the package chromium, then run make test again" >&2; exit 1; }

# A file's tests stay in one process, which makes their models and reports once.
test: setup browser ## all tests
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lab: setup ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab notebooks

figures: setup ## rebuild the committed figures, PNG and SVG, from figures/recorded
	$(BIN)/python -m batch_variance.reporting.rebuild

record-figures: setup ## take a quick report's figures as the committed ones
	$(BIN)/batch-variance report --quick --out $(OUT)
	$(BIN)/python -m batch_variance.reporting.rebuild --record $(OUT)

clean: ## remove the environment and the report
	rm -rf $(VENV) $(OUT)
