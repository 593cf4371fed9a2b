# The everyday commands. Each is a short form of cmake, ctest or uniep; `make help` lists them.
# Builds go to build/<preset>; CMakePresets.json says what the presets are.

# Where there is an nvcc, everything is built, the CUDA backend too; that needs no GPU.
PRESET ?= $(if $(shell PATH=$$PATH:/usr/local/cuda/bin command -v nvcc),cuda,cpu-release)
JOBS   ?= $(shell nproc)
# Tests that run at a time. They start threads of their own, and some have limits of seconds.
TEST_JOBS ?= 2
PREFIX ?= /usr/local
# What the Python package is built for and tested with: its virtual environment is build/venv.
PYTHON ?= python3
# The part of tests/python that `make test-python` runs, and how: what a file's tests share is made once.
PYTEST_FLAGS ?= -q -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
# `make sanitize` runs this part of the random cases that `make test` runs.
SANITIZE_CASES ?= 0.1
SANITIZERS     ?= asan tsan

# A compiler cache, where there is one; `make CCACHE= build` does without.
CCACHE ?= $(shell command -v ccache)
cache_flag = $(if $(CCACHE),-DCMAKE_$(1)_COMPILER_LAUNCHER=$(CCACHE))

# More for CMake, such as -DUNIEP_UNITY=ON where a build is from nothing.
CMAKE_FLAGS ?=

configure_preset = cmake --preset $(1) $(call cache_flag,CXX) \
                   $(if $(filter cuda,$(1)),$(call cache_flag,CUDA)) $(CMAKE_FLAGS)
build_preset     = cmake --build --preset $(1) --parallel $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help deps build run test test-core test-python python sanitize asan tsan asan-build tsan-build \
        bench format format-check install clean

help:  ## list these commands
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1|\2/p' $(firstword $(MAKEFILE_LIST)) | \
	  awk -F'|' '{ printf "  make %-14s%s\n", $$1, $$2 }'
	@echo "Settings now: PRESET=$(PRESET) JOBS=$(JOBS) TEST_JOBS=$(TEST_JOBS) PREFIX=$(PREFIX) CCACHE=$(CCACHE)"

deps:  ## install what is missing (Debian, Ubuntu: apt-get, as root or with sudo)
	@scripts/install_deps.sh

build: deps  ## build all but the Python package; PRESET is cuda, cpu-release, cpu-debug, asan or tsan
	@$(call configure_preset,$(PRESET))
	@$(call build_preset,$(PRESET))

run: build  ## the main job: a real layer on 4 ranks, checked; writes a timeline and a plot to out/
	@mkdir -p out
	build/$(PRESET)/bin/uniep run --input data/moe_lm_layer.safetensors --ranks 4 \
	  --schedule single --check --trace out/timeline.json --plot out/summary.svg \
	  --json out/run.json --output out/result.safetensors

test: test-core test-python  ## all tests, the slow ones and those of the Python package too

test-core: build  ## the same without those of the Python package
	@ctest --preset $(PRESET) --parallel $(TEST_JOBS)

python: deps  ## the Python package, with what its tests need, in build/venv
	@PYTHON=$(PYTHON) CMAKE_CXX_COMPILER_LAUNCHER=$(CCACHE) CMAKE_CUDA_COMPILER_LAUNCHER=$(CCACHE) \
	  UNIEP_CUDA=$(if $(filter cuda,$(PRESET)),ON,OFF) CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) \
	  scripts/python_environment.sh build/venv

test-python: python  ## the tests of the Python package alone
	@build/venv/bin/python -m pytest $(PYTEST_FLAGS) --all-packages tests/python

sanitize: $(SANITIZERS)  ## the tests under AddressSanitizer with UBSan, and ThreadSanitizer

asan-build tsan-build: deps
	@$(call configure_preset,$(@:-build=))
	@$(call build_preset,$(@:-build=)) --target sanitize_tests

asan tsan: %: %-build
	@UNIEP_TEST_CASES=$(SANITIZE_CASES) ctest --preset $@ -L sanitize \
	  --parallel $(TEST_JOBS)

bench: build  ## speed of the tile GEMM compared with OpenBLAS, and of overlap over an emulated link
	build/$(PRESET)/benchmarks/uniep_gemm_bench
	build/$(PRESET)/benchmarks/uniep_overlap_bench

format:  ## format all sources (clang-format 14)
	@scripts/format.sh

format-check:  ## fail where `make format` would change something
	@scripts/format.sh --check

install: build  ## install the library and the command line below PREFIX
	cmake --install build/$(PRESET) --prefix "$(PREFIX)"

clean:  ## remove build/ and out/
	rm -rf build out
