# Each target sets up what it needs; `make` alone lists them.
CLUSTER ?= sandbox
PYTHON := .venv/bin/python
CRD := crds/conch.dev_inferenceservices.yaml

.PHONY: help demo test test-long verify bench sandbox generate clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: .venv/ready ## show the main job end to end on a local cluster; CLUSTER=kind uses Docker
	$(PYTHON) -m demo --cluster=$(CLUSTER)

test: .venv/ready ## unit tests, then tests on a real API server, then on a real cluster with Triton
	$(PYTHON) -m pytest tests/unit tests/cluster e2e -m 'not long' --cluster=$(CLUSTER)

test-long: .venv/ready ## what takes too long for every change
	$(PYTHON) -m pytest tests e2e -m long --cluster=$(CLUSTER)

verify: .venv/ready ## style, types, import contracts, and that everything generated is up to date
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/lint-imports && $(PYTHON) -m conch.api.crd --check $(CRD)

bench: .venv/ready ## measure, print and write build/bench.json
	$(PYTHON) -m bench

sandbox: .venv/ready ## a shell in a running local cluster, with kubectl and KUBECONFIG set
	$(PYTHON) -m sandbox up && $(PYTHON) -m sandbox shell

generate: .venv/ready ## write crds/ and the hashed requirement files anew
	$(PYTHON) -m conch.api.crd > $(CRD) && $(PYTHON) e2e/environment.py lock

clean: ## stop the local cluster and remove what the other targets made here
	[ ! -e .venv/ready ] || $(PYTHON) -m sandbox down
	rm -rf .venv build .pytest-kind .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/ready: operator/requirements-dev.txt e2e/requirements-stores.txt pyproject.toml e2e/environment.py
	python3 e2e/environment.py install
